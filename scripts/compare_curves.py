"""Compares two training logs step by step: a table, a picture of both curves, and an exit code.

    .venv/bin/python scripts/compare_curves.py run.jsonl reference.jsonl --tolerance 1e-3 --out curves.png

Exit code 1 when |A - B| is above the tolerance at any step, a value is not finite, or a step is in one log only.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from common import die, read_log


def print_table(a: dict[int, float], b: dict[int, float], steps: list[int], key: str, max_lines: int) -> None:
    """All steps, or evenly chosen ones, the last included."""
    stride = max(1, -(-len(steps) // max_lines))
    print(f"{'step':>8} {key + ' A':>14} {key + ' B':>14} {'|A - B|':>10} {'relative':>10}")
    for step in [s for i, s in enumerate(steps) if i % stride == 0 or i == len(steps) - 1]:
        difference = abs(a[step] - b[step])
        relative = difference / abs(b[step]) if b[step] else difference
        print(f"{step:>8} {a[step]:>14.6f} {b[step]:>14.6f} {difference:>10.2e} {relative:>10.2e}")


def draw(out: Path, a: dict[int, float], b: dict[int, float], steps: list[int], names: tuple[str, str], key: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained")
    top.plot(list(a), list(a.values()), label=names[0], linewidth=3, alpha=0.5)
    top.plot(list(b), list(b.values()), label=names[1], linewidth=1, color="black", linestyle="--")
    top.set_ylabel(key)
    top.legend()
    bottom.plot(steps, [abs(a[s] - b[s]) for s in steps], color="tab:red", linewidth=1)
    bottom.set_ylabel("|A - B|")
    if any(a[s] != b[s] for s in steps):
        bottom.set_yscale("log")
    bottom.set_xlabel("step")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A.jsonl")
    parser.add_argument("b", type=Path, metavar="B.jsonl")
    parser.add_argument("--key", default="loss", help="what to compare, default: %(default)s")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest |A - B|, default: %(default)s")
    parser.add_argument("--common", action="store_true", help="compare the steps of both; steps of one log only are no error")
    parser.add_argument("--out", type=Path, metavar="curves.png", help="draw both curves")
    parser.add_argument("--names", nargs=2, metavar=("A", "B"), help="their names in the picture, default: the files")
    parser.add_argument("--lines", type=int, default=20, help="lines of the table, default: %(default)s")
    args = parser.parse_args()

    a, b = read_log(args.a, args.key), read_log(args.b, args.key)
    steps = sorted(a.keys() & b.keys())
    if not steps:
        die(f'{args.a} ({len(a)} steps) and {args.b} ({len(b)} steps) have no step with "{args.key}" in common')
    print_table(a, b, steps, args.key, max(1, args.lines))
    worst = max(steps, key=lambda s: abs(a[s] - b[s]) if a[s] == a[s] and b[s] == b[s] else float("inf"))
    difference = abs(a[worst] - b[worst])
    if args.out:
        draw(args.out, a, b, steps, tuple(args.names or (str(args.a), str(args.b))), args.key)
        print(f"wrote {args.out}")
    alone = sorted(a.keys() ^ b.keys())
    if alone:
        print(f"{len(alone)} steps are in one log only, the first is {alone[0]}")
    ok = difference <= args.tolerance and (args.common or not alone)  # nan is not <=
    print(f"{'ok' if ok else 'FAILED'}: {len(steps)} steps, largest |A - B| {difference:.2e} at step {worst} "
          f"(at most {args.tolerance:g})")  # fmt: skip
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()

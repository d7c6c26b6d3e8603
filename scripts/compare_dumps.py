"""Compares the dumps of two trainers, tensor by tensor.

    .venv/bin/python scripts/compare_dumps.py dump reference_dump --only 'grad/*' --steps 1

Each is a directory of step_*.safetensors, or one file. The distance is |A - B| / |B| (L2); integers must be equal.
Logits of padding are left out. Exit code 1 beyond the tolerance, or when a tensor, a step or a shape is missing in one.
"""

from __future__ import annotations

import argparse
import fnmatch
from pathlib import Path

import torch
from safetensors import safe_open

from common import die
from packed import PADDING, relative_l2


def files_of(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {"": path}
    files = {file.name: file for file in sorted(path.glob("step_*.safetensors"))}
    if not files:
        die(f"{path}: neither a file nor a directory with step_*.safetensors")
    return files


def distance(name: str, a: torch.Tensor, b: torch.Tensor, document_ids: torch.Tensor | None) -> float:
    if a.shape != b.shape:
        print(f"{name}: shapes {list(a.shape)} and {list(b.shape)}")
        return float("inf")
    if not (a.is_floating_point() and b.is_floating_point()):
        return 0.0 if torch.equal(a, b) else float("inf")
    if name == "logits" and document_ids is not None:
        a, b = a[document_ids != PADDING], b[document_ids != PADDING]
    error = relative_l2(a, b)
    return error if error == error else float("inf")


def compare_files(label: str, path_a: Path, path_b: Path, only: str) -> list[tuple[float, str]]:
    """(distance, name) of every tensor that either has and that `only` matches."""
    with safe_open(path_a, framework="pt") as a, safe_open(path_b, framework="pt") as b:
        ids = a.get_tensor("batch/document_ids") if "batch/document_ids" in a.keys() else None
        names_a, names_b = ({n for n in f.keys() if fnmatch.fnmatchcase(n, only)} for f in (a, b))
        for name in sorted(names_a ^ names_b):
            print(f"{label}{name}: only in {path_a if name in names_a else path_b}")
        missing = [(float("inf"), label + name) for name in names_a ^ names_b]
        both = sorted(names_a & names_b)
        return missing + [(distance(n, a.get_tensor(n), b.get_tensor(n), ids), label + n) for n in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    parser.add_argument("--only", default="*", metavar="GLOB", help="compare these tensors, default: all")
    parser.add_argument("--steps", type=int, help="compare the first so many dumps; otherwise both need the same")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="default: %(default)s")
    parser.add_argument("--worst", type=int, default=10, help="how many to list, default: %(default)s")
    args = parser.parse_args()

    files_a, files_b = files_of(args.a), files_of(args.b)
    if args.steps is not None:
        files_a, files_b = (dict(list(files.items())[: args.steps]) for files in (files_a, files_b))
    if set(files_a) != set(files_b) and "" not in {*files_a, *files_b}:
        die(f"{args.a} and {args.b} hold different steps: {min(set(files_a) ^ set(files_b))} is in one only; see --steps")
    results = []
    for (name, a), b in zip(files_a.items(), files_b.values()):
        results += compare_files(f"{name}: " if len(files_a) > 1 else "", a, b, args.only)
    if not results:
        die(f'no tensor matches --only "{args.only}"')
    results.sort(reverse=True)
    for error, name in results[: args.worst]:
        print(f"{error:10.2e}  {name}")
    ok = results[0][0] <= args.tolerance
    print(f"{'ok' if ok else 'FAILED'}: {len(results)} tensors of {len(files_a)} dump(s), worst {results[0][0]:.2e} "
          f"(at most {args.tolerance:g})")  # fmt: skip
    raise SystemExit(0 if ok else 1)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Measures build/train_gpt against PyTorch + transformers on the same model, data and machine, side by side in one run.

    make bench                                # all cases, writes test/bench/results/<commit>.md
    .venv/bin/python scripts/bench.py dense   # one case

Both programs take turns (--rounds), each run drops its first steps, and medians are compared: the ratio is the result,
tokens/s depend on the machine's mood. The peer trains with its fastest attention (sdpa) and fused AdamW.
"""
import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name: model of configs/models, tokens a row, rows a step, lengths of documents, steps, checkpointing of activations
CASES = {
    "dense": dict(model="bench_v8192", seq_len=512, rows=4, lengths=(512, 512), steps=6, recompute=False),
    "packed": dict(model="bench_v8192", seq_len=4096, rows=1, lengths=(200, 400), steps=4, recompute=False),
    # Qwen3-30B-A3B scaled down: 8 of 64 experts of 3/8 the width
    "experts": dict(model="bench_qwen3_moe", seq_len=512, rows=8, lengths=(512, 512), steps=5, recompute=False),
    "memory": dict(model="bench_v32000", seq_len=8192, rows=1, lengths=(200, 400), steps=3, recompute=False),
    "memory_recompute": dict(model="bench_v32000", seq_len=8192, rows=1, lengths=(200, 400), steps=3, recompute=True),
}
WARMUP = 1  # steps that do not count


def model_path(case: dict) -> Path:
    return ROOT / "configs/models" / f"{case['model']}.json"


def model_config(case: dict) -> dict:
    return json.loads(model_path(case).read_text())


def documents(case: dict) -> list[list[int]]:
    """Random documents that fill every row of every step exactly."""
    rng = random.Random(0)
    vocab = model_config(case)["vocab_size"]
    docs = []
    for _ in range(case["steps"] * case["rows"]):
        left = case["seq_len"]
        while left:
            n = min(left, rng.randint(*case["lengths"]))
            if 0 < left - n < 2:
                n = left
            docs.append([rng.randrange(vocab) for _ in range(n)])
            left -= n
    return docs


def run_ours(case: dict, binary: str, work: Path, data: Path, ranks: int = 0, options: tuple[str, ...] = ()) -> dict:
    """`ranks` > 0: under mpirun, one thread a rank."""
    run = Path(tempfile.mkdtemp(dir=work))
    launcher = ["mpirun", "--bind-to", "core", "-n", str(ranks)] if ranks else []
    command = [*launcher, binary, "--model.path", str(model_path(case)), "--model.init", "random", "--data.train", str(data),
               "--data.seq_len", str(case["seq_len"]), "--data.packing", "concat", "--data.shuffle", "false",
               "--data.cache_dir", str(run / "cache"),
               "--batch.micro_batch_size", str(case.get("micro", case["rows"])), "--batch.global_batch_size", str(case["rows"]),
               "--optimizer.lr", "3e-4", "--train.steps", str(case["steps"]), "--checkpoint.dir", str(run / "out"),
               "--memory.recompute", "block" if case["recompute"] else "none", *options]
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    if out.returncode:
        sys.exit(f"train_gpt failed:\n{out.stdout}{out.stderr}")
    lines = [json.loads(line) for line in (run / "out/log.jsonl").read_text().splitlines()][WARMUP:]
    total = [line for line in out.stdout.splitlines() if line.startswith("total")][-1]
    return dict(tokens_per_s=statistics.median(line["tokens_per_s"] for line in lines), loss=lines[-1]["loss"],
                peak_mib=max(line["mem_mib"] for line in lines), planned_mib=float(total.split()[-1]),
                waiting=statistics.median(line.get("wait_ms", 0) / line["step_ms"] for line in lines))


def ranks_table(args: argparse.Namespace, work: Path) -> list[str]:
    """Weak scaling: 4096 tokens and one thread a rank, 1 rank against 2, in turns."""
    one = CASES["packed"]
    runs = {"1 rank": (one, 1, ()), "2 ranks, ZeRO-3": (dict(one, rows=2, micro=1), 2, ()),
            "2 ranks, Ulysses, T=8192": (dict(one, seq_len=2 * one["seq_len"]), 2, ("--parallel.sp_size", "2"))}
    results: dict[str, list[dict]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, (case, ranks, options) in runs.items():
            data = work / "ranks.jsonl"
            data.write_text("".join(json.dumps({"input_ids": doc}) + "\n" for doc in documents(case)))
            results[name].append(run_ours(case, args.binary, work, data, ranks, ("--log.traffic", "true", *options)))
    alone = statistics.median(r["tokens_per_s"] for r in results["1 rank"])
    lines = ["", "Weak scaling, 4096 tokens and one thread a rank, medians of rounds taken in turns:", "",
             "| ranks | tokens/s | of ideal | of the step waiting for collectives |", "|---|---|---|---|"]
    for name, found in results.items():
        rate, ranks = statistics.median(r["tokens_per_s"] for r in found), runs[name][1]
        waiting = statistics.median(r["waiting"] for r in found)
        lines.append(f"| {name} | {rate:.0f} | {100 * rate / (alone * ranks):.0f}% | {100 * waiting:.1f}% |")
        print(lines[-1], flush=True)
    return lines


def peer(name: str, data: Path) -> None:
    """In a process of its own: prints one JSON object."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    case = CASES[name]
    torch.set_num_threads(os.cpu_count())
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(str(model_path(case)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    if case["recompute"]:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    docs = iter(json.loads(line)["input_ids"] for line in data.read_text().splitlines())
    rates, loss = [], 0.0
    for step in range(case["steps"]):
        ids, labels, positions = [], [], []
        for _ in range(case["rows"]):
            row_ids, row_labels, row_positions = [], [], []
            while len(row_ids) < case["seq_len"]:
                doc = next(docs)
                row_ids += doc
                row_labels += doc[1:] + [-100]
                row_positions += range(len(doc))
            ids.append(row_ids), labels.append(row_labels), positions.append(row_positions)
        ids, labels, positions = (torch.tensor(x) for x in (ids, labels, positions))
        packed = case["lengths"][0] < case["seq_len"]
        start = time.perf_counter()
        out = model(input_ids=ids, position_ids=positions if packed else None, labels=labels, shift_labels=labels,
                    use_cache=False)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = out.loss.item()
        rates.append(ids.numel() / (time.perf_counter() - start))
    print(json.dumps(dict(tokens_per_s=statistics.median(rates[WARMUP:]), loss=loss,
                          peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)))


def run_peer(name: str, data: Path) -> dict:
    out = subprocess.run([sys.executable, __file__, "--peer", name, "--data", str(data)], capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"the peer failed:\n{out.stderr}")
    return json.loads(out.stdout.splitlines()[-1])


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def flops_per_token(case: dict) -> float:
    """Model flops, forward and backward, as llama/flops.h counts them."""
    m = model_config(case)
    c, heads, kv, layers = (m[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"))
    head = m.get("head_dim", c // heads)
    mlp = 3 * c * m["intermediate_size"]
    if "num_experts" in m:
        mlp = 3 * c * m["moe_intermediate_size"] * m["num_experts_per_tok"] + c * m["num_experts"]
    matmul = layers * (c * (heads + 2 * kv) * head + heads * head * c + mlp)
    mean = sum(case["lengths"]) / 2
    pairs = (mean + 1) / 2  # visible to a token, on average
    return 6 * matmul + 6 * c * m["vocab_size"] * (1 - 1 / mean) + 12 * layers * heads * head * pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", action="store_true", help="weak scaling under mpirun, too")
    parser.add_argument("--binary", default="build/train_gpt")
    parser.add_argument("--fma-peak", type=float, default=0, help="GFLOP/s of the FMA units, as kernels_bench measures")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        peer(args.peer, args.data)
        return
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"unknown case {unknown[0]}")

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    import torch
    import transformers

    lines = [f"# {commit}, {time.strftime('%Y-%m-%d')}", "",
             f"{cpu_name()}, {os.cpu_count()} cores; torch {torch.__version__}, transformers {transformers.__version__}; "
             f"medians of {args.rounds} rounds, taken in turns. FMA peak {args.fma_peak:.0f} GFLOP/s.", "",
             "| case | ours tokens/s | peer tokens/s | ratio | of FMA peak | ours peak MiB | planned | peer peak MiB | memory ratio |",
             "|---|---|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as work:
        for name in args.cases:
            case = CASES[name]
            data = Path(work) / f"{name}.jsonl"
            data.write_text("".join(json.dumps({"input_ids": doc}) + "\n" for doc in documents(case)))
            ours, theirs = [], []
            for _ in range(args.rounds):
                ours.append(run_ours(case, args.binary, Path(work), data))
                theirs.append(run_peer(name, data))
            a = statistics.median(r["tokens_per_s"] for r in ours)
            b = statistics.median(r["tokens_per_s"] for r in theirs)
            share = f"{a * flops_per_token(case) / args.fma_peak / 1e7:.0f}%" if args.fma_peak else "-"
            memory, planned = ours[-1]["peak_mib"], ours[-1]["planned_mib"]
            peer_memory = max(r["peak_mib"] for r in theirs)
            lines.append(f"| {name} | {a:.0f} | {b:.0f} | {a / b:.2f} | {share} | {memory:.0f} | {planned:.0f} "
                         f"| {peer_memory:.0f} | {peer_memory / memory:.1f} |")
            print(lines[-1], flush=True)
        if args.ranks:
            lines += ranks_table(args, Path(work))
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()

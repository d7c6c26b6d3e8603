#!/usr/bin/env python3
"""Tokens/s of PyTorch + transformers on this GPU, beside which scripts/gpu_check.sh puts train_gpt's.

    python3 scripts/gpu_peer.py configs/models/qwen2.5_0.5b.json 1024 16 [--recompute]

Random weights and tokens, rows of SEQ_LEN, MICRO_BATCH of them a step. What such a run usually is: weights and moments in
bf16, sdpa attention, fused AdamW (train_gpt keeps weights, moments and gradients in fp32). Prints one line.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

STEPS, WARMUP = 8, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a config.json")
    parser.add_argument("seq_len", type=int)
    parser.add_argument("micro_batch", type=int)
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(str(args.model))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.train()
    if args.recompute:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    rates = []
    for _ in range(STEPS):
        ids = torch.randint(config.vocab_size, (args.micro_batch, args.seq_len), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        rates.append(ids.numel() / (time.perf_counter() - start))
    print(f"{statistics.median(rates[WARMUP:]):.0f} tokens/s, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")


if __name__ == "__main__":
    main()

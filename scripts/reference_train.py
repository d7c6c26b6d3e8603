"""Trains with plain PyTorch and transformers on a run config of train_gpt, and writes the same JSONL log and dumps.

    build/train_gpt CONFIG.json --debug.dump_dir dump --debug.dump_steps 50
    .venv/bin/python scripts/reference_train.py CONFIG.json --batches dump --log reference.jsonl
    .venv/bin/python scripts/compare_curves.py checkpoints/log.jsonl reference.jsonl

With --batches it trains on exactly what train_gpt dumped. Without, it reads JSONL files itself, in their order (needs
data.shuffle false): packing none, concat, or best_fit over all documents. A piece of a split document is a document.
float32 on the CPU, AdamW, gradient accumulation over micro-batches, loss = sum of nll / N over the whole step, gradients
scaled by min(1, max_grad_norm / (norm + 1e-6)). Checkpointing, resuming, evaluation and parallel sizes are ignored.
"""

from __future__ import annotations

import argparse
import fnmatch
import glob
import json
import math
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from common import die, parse_record
from packed import IGNORE, Batch, is_vision, model_class, nll_sum, pack_rows, packed_logits, read_batch, write_dump
from run_config import load_run_config
from schedule import lr_at

Document = tuple[list[int], list[int]]  # input_ids, labels aligned with them
Config = dict[str, dict[str, Any]]


# ---- data


def read_documents(run: Config, vocab_size: int) -> list[Document]:
    """All documents of data.train, in order; none longer than seq_len, but for packing concat."""
    data, documents = run["data"], []
    if data["format"] not in ("auto", "jsonl"):
        die(f'data.format is "{data["format"]}"; this loader reads jsonl only: use --batches')
    for source in data["train"]:
        if isinstance(source, dict) and source.get("weight", 1) != 1:
            die(f"{source['path']}: this loader knows no weights: use --batches")
        pattern = source["path"] if isinstance(source, dict) else source
        files = sorted(glob.glob(pattern))
        if not files:
            die(f"data.train: {pattern}: no such file")
        for file in files:
            for number, line in enumerate(Path(file).read_text().splitlines(), 1):
                where = f"{file}:{number}"
                record = parse_record(line, where)
                ids, labels = record.get("input_ids"), record.get("labels", record.get("input_ids"))
                if not ids or len(ids) != len(labels):
                    die(f"{where}: {len(ids or [])} input_ids and {len(labels or [])} labels")
                if not 0 <= min(ids) <= max(ids) < vocab_size:
                    die(f"{where}: a token id is outside the vocabulary of {vocab_size}")
                if data["packing"] == "concat":  # cut where a row ends
                    documents.append((ids, labels))
                else:
                    documents += fit_length((ids, labels), data["seq_len"], data["long_documents"], where)
    return documents


def fit_length(document: Document, seq_len: int, rule: str, where: str) -> list[Document]:
    ids, labels = document
    if len(ids) <= seq_len:
        return [document]
    if rule == "error":
        die(f"{where}: {len(ids)} tokens are more than data.seq_len {seq_len} (data.long_documents is error)")
    starts = {"drop": [], "truncate": [0], "split": range(0, len(ids), seq_len)}[rule]
    return [(ids[i : i + seq_len], labels[i : i + seq_len]) for i in starts]


def pack(documents: list[Document], seq_len: int, packing: str) -> list[list[Document]]:
    """Rows of documents. best_fit: each goes where the least room is left that holds it; rows stay in opening order."""
    if packing == "none":
        return [[document] for document in documents]
    rows: list[list[Document]] = []
    room: list[int] = []
    for ids, labels in documents:
        if packing == "concat":  # the stream is cut wherever a row ends
            while ids:
                if not room or room[-1] == 0:
                    rows.append([]), room.append(seq_len)
                take = min(room[-1], len(ids))
                rows[-1].append((ids[:take], labels[:take]))
                room[-1] -= take
                ids, labels = ids[take:], labels[take:]
        else:
            fitting = [r for r in range(len(rows)) if room[r] >= len(ids)]
            if not fitting:
                rows.append([]), room.append(seq_len)
                fitting = [len(rows) - 1]
            row = min(fitting, key=lambda r: room[r])
            rows[row].append((ids, labels))
            room[row] -= len(ids)
    return rows


def own_batches(run: Config, model_config: Any) -> tuple[Iterator[Batch], int]:
    """The global batches, epoch after epoch, and how many there are by train.steps or train.epochs."""
    if run["data"]["shuffle"]:
        die("data.shuffle is true, and only train_gpt knows its order: set it to false, or use --batches")
    rows = pack(read_documents(run, model_config.vocab_size), run["data"]["seq_len"], run["data"]["packing"])
    if not rows:
        die("data.train holds no documents")
    size = run["batch"]["global_batch_size"]
    steps, epochs = run["train"]["steps"], run["train"]["epochs"]
    num_rows = steps * size if steps is not None else math.ceil((epochs or 1) * len(rows))
    pad_id = model_config.pad_token_id or 0

    def batches() -> Iterator[Batch]:
        stream = islice(cycle(rows), num_rows)
        while step_rows := list(islice(stream, size)):
            yield pack_rows(step_rows, run["data"]["seq_len"], pad_id)

    return batches(), math.ceil(num_rows / size)


def dumped_batches(directory: Path, steps: int | None) -> tuple[Iterator[Batch], int]:
    files = sorted(directory.glob("step_*.safetensors"))
    if not files:
        die(f"{directory}: no step_*.safetensors; run train_gpt with --debug.dump_dir and --debug.dump_steps")
    if steps is not None and steps > len(files):
        die(f"{directory}: {len(files)} batches for train.steps {steps}; raise debug.dump_steps, or lower train.steps here")
    return (read_batch(file) for file in files[:steps]), steps or len(files)


# ---- training


def load_model(run: Config) -> torch.nn.Module:
    path = Path(run["model"]["path"])
    if run["model"]["init"] != "pretrained":
        die('model.init must be "pretrained": random weights are train_gpt\'s own; save them first, and start from there')
    if run["train"]["dtype"] not in ("auto", "fp32") or run["optimizer"]["name"] != "adamw":
        die("only train.dtype fp32 and optimizer.name adamw are supported")
    if not (path / "config.json").is_file():
        die(f"model.path: {path / 'config.json'}: no such file")
    config = AutoConfig.from_pretrained(path)
    softcap = getattr(config, "attn_logit_softcapping", None)
    model = model_class(config).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager" if softcap else "sdpa").train()  # fmt: skip
    for name, p in model.named_parameters():
        p.requires_grad_(not is_vision(name, model))
    return model


def trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def make_optimizer(model: torch.nn.Module, optimizer: dict[str, Any]) -> torch.optim.AdamW:
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, p in trained(model):
        groups[not any(fnmatch.fnmatchcase(name, pattern) for pattern in optimizer["no_decay"])].append(p)
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": optimizer["weight_decay"]}, {"params": groups[False], "weight_decay": 0.0}],
        lr=optimizer["lr"], betas=tuple(optimizer["betas"]), eps=optimizer["eps"])  # fmt: skip


def backward(model: torch.nn.Module, batch: Batch, micro_batch_size: int, keep_logits: bool) -> tuple[float, list[torch.Tensor]]:
    """Gradients of the whole step; returns its loss, and the logits if they are kept."""
    model.zero_grad()
    loss, kept = 0.0, []
    for begin in range(0, len(batch.input_ids), micro_batch_size):
        micro = batch.rows(begin, begin + micro_batch_size)
        logits = packed_logits(model, micro)
        micro_loss = nll_sum(logits, micro) / batch.num_loss_tokens
        micro_loss.backward()
        loss += micro_loss.item()
        if keep_logits:
            kept.append(logits.detach())
    return loss, kept


def clip_gradients(model: torch.nn.Module, max_norm: float) -> float:
    """Returns the norm before; max_norm 0 clips nothing. The formula of torch.nn.utils.clip_grad_norm_."""
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for _, p in trained(model)))
    scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
    for _, p in trained(model):
        p.grad.mul_(scale)
    return norm


def train(run: Config, args: argparse.Namespace) -> None:
    model = load_model(run)
    optimizer = make_optimizer(model, run["optimizer"])
    if args.batches:
        batches, steps = dumped_batches(args.batches, run["train"]["steps"])
    else:
        batches, steps = own_batches(run, model.config)
    schedule = run["schedule"]
    args.log.parent.mkdir(parents=True, exist_ok=True)
    with args.log.open("w", buffering=1) as log:
        for step, batch in enumerate(batches):
            start = time.perf_counter()
            if batch.num_loss_tokens == 0:
                die(f"step {step + 1} has no target: every label of its documents is {IGNORE}")
            dumping = args.dump is not None and step < run["debug"]["dump_steps"]
            loss, logits = backward(model, batch, run["batch"]["micro_batch_size"], dumping and run["debug"]["dump_logits"])
            dump = batch.tensors()
            if dumping:
                dump |= {f"grad/{name}": p.grad.clone() for name, p in trained(model)}
            norm = clip_gradients(model, run["optimizer"]["max_grad_norm"])
            if not (math.isfinite(loss) and math.isfinite(norm)):
                die(f"step {step + 1}: loss {loss}, gradient norm {norm}; the weights were not changed")
            lr = lr_at(step, steps, run["optimizer"]["lr"], schedule["name"], schedule["warmup_steps"],
                       schedule["min_lr_ratio"], schedule["decay_ratio"])  # fmt: skip
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            seconds = time.perf_counter() - start
            record = {"step": step + 1, "loss": loss, "grad_norm": norm, "lr": lr, "num_tokens": batch.num_tokens,
                      "num_loss_tokens": batch.num_loss_tokens, "tokens_per_s": batch.num_tokens / seconds,
                      "step_ms": 1000 * seconds}  # fmt: skip
            log.write(json.dumps(record) + "\n")
            print(f"step {step + 1}/{steps}  loss {loss:.6f}  norm {norm:.4f}  lr {lr:.3e}  {record['tokens_per_s']:.0f} tokens/s")
            if dumping:
                dump |= {"loss": torch.tensor([loss]), "grad_norm": torch.tensor([norm])}
                dump |= {f"param/{name}": p for name, p in trained(model)}
                dump |= {"logits": torch.cat(logits)} if logits else {}
                write_dump(args.dump / f"step_{step + 1:06d}.safetensors", dump)
    if args.save:
        model.save_pretrained(args.save)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s CONFIG.json [--section.key value]... [--batches DIR] [--dump DIR] [--log FILE] [--save DIR]")  # fmt: skip
    parser.add_argument("config", type=Path, metavar="CONFIG.json")
    parser.add_argument("--batches", type=Path, metavar="DIR", help="train on the batches of these dumps")
    parser.add_argument("--dump", type=Path, metavar="DIR", help="write dumps as debug.dump_dir does, of debug.dump_steps steps")
    parser.add_argument("--log", type=Path, metavar="FILE", default=Path("reference.jsonl"), help="default: %(default)s")
    parser.add_argument("--save", type=Path, metavar="DIR", help="save the trained model there")
    args, overrides = parser.parse_known_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    train(load_run_config(args.config, overrides), args)


if __name__ == "__main__":
    main()

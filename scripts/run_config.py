"""The run config of train_gpt as the reference scripts read it: CONFIG.json, then --section.key value."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from common import die

DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"path": "", "init": "pretrained", "seed": 42},
    "data": {"train": [], "eval": [], "format": "auto", "seq_len": 4096, "packing": "best_fit", "long_documents": "split",
             "shuffle": True, "seed": 42, "cache_dir": ""},
    "batch": {"micro_batch_size": 1, "global_batch_size": 8},
    "optimizer": {"name": "adamw", "lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0,
                  "no_decay": ["*norm*", "*bias"]},
    "schedule": {"name": "cosine", "warmup_steps": 0, "min_lr_ratio": 0.1, "decay_ratio": 0.2},
    "train": {"steps": None, "epochs": None, "device": "auto", "dtype": "auto", "grad_dtype": "fp32", "eval_every": 0},
    "parallel": {"sp_size": 1, "cp_size": 1, "dp_replicate_size": 1},
    "memory": {"recompute": "none", "offload": "none", "loss_tile_tokens": 0},
    "checkpoint": {"dir": "checkpoints", "every": 0, "keep": 2, "resume": "auto"},
    "log": {"file": "", "every": 1},
    "debug": {"dump_dir": "", "dump_steps": 1, "dump_logits": False},
}  # fmt: skip
SCALE = {"": 1} | {k: 1000 ** (i + 1) for i, k in enumerate("kMGT")} | {f"{k}i": 1024 ** (i + 1) for i, k in enumerate("kMGT")}


def human_number(text: str) -> int | float | None:
    """128k, 2M, 64Ki, 1e-5; None if it is not a number."""
    match = re.fullmatch(r"([-+]?[\d_]+(?:\.\d+)?(?:[eE][-+]?\d+)?)([kMGT]?i?)", text.replace("K", "k"))
    if not match or match[2] not in SCALE:
        return None
    number = float(match[1]) * SCALE[match[2]]
    return int(number) if number.is_integer() else number


def check_key(key: str, known: list[str]) -> None:
    if key not in known:
        nearest = difflib.get_close_matches(key, known, n=1)
        die(f"unknown key {key}" + (f"; did you mean {nearest[0]}?" if nearest else f"; there are {', '.join(known)}"))


def convert(key: str, value: Any, default: Any) -> Any:
    """A number written as a person does; a text where a list of texts is meant."""
    if isinstance(value, str) and (isinstance(default, (int, float)) or key in ("train.steps", "train.epochs")):
        if isinstance(default, bool):
            if value not in ("true", "false"):
                die(f'{key} is "{value}"; it must be true or false')
            return value == "true"
        number = human_number(value)
        if number is None:
            die(f'{key} is "{value}", which is not a number')
        return number
    if isinstance(default, list) and not isinstance(value, list):
        items = str(value).split(",")
        return [human_number(item) for item in items] if key == "optimizer.betas" else items
    return default if value is None else value


def load_run_config(path: Path, overrides: list[str]) -> dict[str, dict[str, Any]]:
    """Every section with every key."""
    if not path.is_file():
        die(f"{path}: no such file")
    try:
        given = json.loads(path.read_text())
    except ValueError as e:
        die(f"{path}: not valid JSON: {e}")
    flat: dict[str, Any] = {}
    for section, keys in given.items():
        check_key(section, list(DEFAULTS))
        flat |= {f"{section}.{key}": value for key, value in keys.items()}
    if len(overrides) % 2:
        die(f"{overrides[-1]} has no value")
    for name, value in zip(overrides[::2], overrides[1::2]):
        if not name.startswith("--"):
            die(f"{name}: --section.key was expected")
        flat[name[2:]] = value
    known = [f"{section}.{key}" for section, keys in DEFAULTS.items() for key in keys]
    run = {section: dict(keys) for section, keys in DEFAULTS.items()}
    for name, value in flat.items():
        check_key(name, known)
        section, key = name.split(".", 1)
        run[section][key] = convert(name, value, DEFAULTS[section][key])
    return run

"""Opens a checkpoint directory with transformers and compares its logits with those of a dump.

    .venv/bin/python scripts/check_checkpoint.py checkpoints/step_000100 --expected dump/step_000101.safetensors

Uses the transformers of the Python that runs it (run it once with 4.57.1, once with 5.24.0). No key may be missing or
unexpected. Exit code 1 when the relative L2 distance of the logits of all documents is above the tolerance.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from common import die
from packed import PADDING, packed_logits, read_batch, relative_l2


def load(directory: Path, config_file: str) -> torch.nn.Module:
    """from_pretrained in float32; dies if anything but a perfect match was reported."""
    if not (directory / config_file).is_file():
        die(f"{directory / config_file}: no such file; a checkpoint is a directory with config.json and model.safetensors")
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, config=AutoConfig.from_pretrained(directory / config_file), dtype=torch.float32,
        attn_implementation="eager", output_loading_info=True)  # fmt: skip
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        die(f"{directory}: transformers {transformers.__version__} reports {wrong}")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the checkpoint")
    parser.add_argument("--expected", type=Path, required=True, help="a dump with batch/* and logits of these weights")
    parser.add_argument("--config", default="config.json", help="its config file, default: %(default)s")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative L2, default: %(default)s")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()

    batch = read_batch(args.expected)
    with safe_open(args.expected, framework="pt") as f:
        if "logits" not in f.keys():
            die(f"{args.expected}: no logits; dump them with --debug.dump_logits true")
        expected = f.get_tensor("logits")
    model = load(args.directory, args.config)
    if list(expected.shape) != [*batch.input_ids.shape, model.config.vocab_size]:
        die(f"{args.expected}: logits have the shape {list(expected.shape)}, but the batch is "
            f"{list(batch.input_ids.shape)} and the vocabulary {model.config.vocab_size}")  # fmt: skip
    with torch.no_grad():
        logits = packed_logits(model, batch)
    valid = torch.from_numpy(batch.document_ids != PADDING)
    error = relative_l2(logits[valid], expected[valid])
    verdict = "ok" if error <= args.tolerance else "FAILED"
    print(f"{verdict}: {args.directory} in transformers {transformers.__version__}: logits of {int(valid.sum())} tokens "
          f"differ by {error:.2e} relative L2 (at most {args.tolerance:g})")  # fmt: skip
    if error > args.tolerance or error != error:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Opens checkpoint directories with transformers and compares their logits with those of dumps.

    .venv/bin/python scripts/check_checkpoint.py checkpoints/step_000100 --expected dump/step_000101.safetensors

Several directories take as many dumps, and as many --original: what each was trained from, whose vision tensors it must hold. Uses the transformers of the Python that runs it (run it once with 4.57.1, once with 5.24.0). No key may be missing or
unexpected. Exit code 1 when the relative L2 distance of the logits of all documents is above the tolerance.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig

from common import die
from packed import PADDING, alone_logits, eager, has_vision, model_class, packed_logits, read_batch, relative_l2


# How names of a decoder begin, by age of the checkpoint; what begins otherwise sees.
TEXT = ("language_model.", "model.language_model.", "model.layers.", "model.norm.", "model.embed_tokens.", "lm_head.")


def load(directory: Path, config_file: str) -> torch.nn.Module:
    """from_pretrained in float32; dies if anything but a perfect match was reported."""
    if not (directory / config_file).is_file():
        die(f"{directory / config_file}: no such file; a checkpoint is a directory with config.json and model.safetensors")
    config = AutoConfig.from_pretrained(directory / config_file)
    model, info = model_class(config).from_pretrained(
        directory, config=config, dtype=torch.float32, output_loading_info=True, **eager(config))  # fmt: skip
    wrong = {key: value for key, value in info.items() if value}
    if wrong:
        die(f"{directory}: transformers {transformers.__version__} reports {wrong}")
    return model.eval()


def stored(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(directory.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as f:
            tensors |= {name: f.get_tensor(name) for name in f.keys()}
    return tensors


def check_vision(directory: Path, original: Path) -> None:
    """Every tensor under the name it had; those of vision with their bytes."""
    before, after = stored(original), stored(directory)
    if before.keys() != after.keys():
        die(f"{directory} has other tensors than {original}: {sorted(before.keys() ^ after.keys())}")
    vision = [name for name in before if not name.startswith(TEXT)]
    for name in vision:
        if before[name].dtype != after[name].dtype or not torch.equal(before[name], after[name]):
            die(f"{directory}: {name} is not what it was in {original}")
    print(f"ok: {len(vision)} vision tensors of {directory} are those of {original}, bit for bit")


def check(directory: Path, expected_file: Path, original: Path | None, config_file: str, tolerance: float) -> float:
    """The relative L2 distance of the logits."""
    batch = read_batch(expected_file)
    with safe_open(expected_file, framework="pt") as f:
        if "logits" not in f.keys():
            die(f"{expected_file}: no logits; dump them with --debug.dump_logits true")
        expected = f.get_tensor("logits")
    model = load(directory, config_file)
    vocab_size = model.config.get_text_config().vocab_size
    if list(expected.shape) != [*batch.input_ids.shape, vocab_size]:
        die(f"{expected_file}: logits have the shape {list(expected.shape)}, but the batch is "
            f"{list(batch.input_ids.shape)} and the vocabulary {vocab_size}")  # fmt: skip
    with torch.no_grad():
        # Eager attention joins the packed documents of these two: gpt-oss in any version, Qwen2-MoE in 4. Chunks are
        # counted from the start of a row.
        has_chunks = "chunked_attention" in (getattr(model.config, "layer_types", None) or [])
        joins = has_chunks or model.config.model_type in ("gpt_oss", "qwen2_moe")
        logits = (alone_logits if joins else packed_logits)(model, batch)
    valid = torch.from_numpy(batch.document_ids != PADDING)
    error = relative_l2(logits[valid], expected[valid])
    if original is not None and has_vision(model.config):
        check_vision(directory, original)
    verdict = "ok" if error <= tolerance else "FAILED"
    print(f"{verdict}: {directory} in transformers {transformers.__version__}: logits of {int(valid.sum())} tokens "
          f"differ by {error:.2e} relative L2 (at most {tolerance:g})")  # fmt: skip
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+", metavar="directory", help="a checkpoint")
    parser.add_argument("--expected", type=Path, nargs="+", required=True, help="a dump with batch/* and logits of each")
    parser.add_argument("--original", type=Path, nargs="+", help="what each was trained from: its vision tensors must be there")
    parser.add_argument("--config", default="config.json", help="its config file, default: %(default)s")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="relative L2, default: %(default)s")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    if len(args.directories) != len(args.expected):
        die(f"{len(args.directories)} directories, but {len(args.expected)} dumps; give one for each")
    originals = args.original or [None] * len(args.directories)
    if len(args.directories) != len(originals):
        die(f"{len(args.directories)} directories, but {len(originals)} originals; give one for each")
    cases = zip(args.directories, args.expected, originals)
    errors = [check(*case, args.config, args.tolerance) for case in cases]
    if not all(error <= args.tolerance for error in errors):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

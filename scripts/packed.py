"""Packed batches, and how transformers computes on them: what all reference scripts share.

A batch is what the trainer dumps: rows of T tokens that hold several documents. Here every document is computed so that
it sees no other one, with eager or sdpa attention, and never with a 2D attention mask (which would silently join them).

Letters: T tokens of a row, V vocabulary, N targets that count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from common import die

IGNORE = -100  # a target without loss
PADDING = -1  # the document id of padding
MROPE_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # a token has three positions; of text, all equal
BATCH_KEYS = ("input_ids", "targets", "positions", "document_ids")


@dataclass
class Batch:
    """(rows, T) int32 each. targets are shifted already; positions restart with every document."""

    input_ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    document_ids: np.ndarray

    def rows(self, begin: int, end: int) -> Batch:
        return Batch(*(getattr(self, key)[begin:end] for key in BATCH_KEYS))

    @property
    def num_tokens(self) -> int:
        return int((self.document_ids != PADDING).sum())

    @property
    def num_loss_tokens(self) -> int:
        return int((self.targets != IGNORE).sum())

    def documents(self) -> Iterator[tuple[int, int, int]]:
        """(row, begin, end) of every document, padding left out."""
        for row, ids in enumerate(self.document_ids):
            cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
            for begin, end in zip(cuts, cuts[1:]):
                if ids[begin] != PADDING:
                    yield row, begin, end

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"batch/{key}": torch.from_numpy(getattr(self, key).astype(np.int32)) for key in BATCH_KEYS}


def read_batch(path: Path) -> Batch:
    """The batch/* tensors of a dump."""
    if not path.is_file():
        die(f"{path}: no such file")
    with safe_open(path, framework="np") as f:
        missing = [key for key in BATCH_KEYS if f"batch/{key}" not in f.keys()]
        if missing:
            die(f"{path}: no tensor batch/{missing[0]}; is this a dump of debug.dump_dir?")
        return Batch(*(f.get_tensor(f"batch/{key}") for key in BATCH_KEYS))


def pack_rows(rows: list[list[tuple[list[int], list[int]]]], row_len: int, pad_id: int) -> Batch:
    """Rows of documents (input_ids, labels aligned with them; IGNORE = no loss) -> a batch, padded to row_len."""
    ids, targets = np.full((len(rows), row_len), pad_id), np.full((len(rows), row_len), IGNORE)
    positions, document_ids = np.zeros((len(rows), row_len)), np.full((len(rows), row_len), PADDING)
    for r, documents in enumerate(rows):
        end = 0
        for d, (tokens, labels) in enumerate(documents):
            begin, end = end, end + len(tokens)
            ids[r, begin:end] = tokens
            targets[r, begin : end - 1] = labels[1:]
            positions[r, begin:end] = np.arange(len(tokens))
            document_ids[r, begin:end] = d
        tail = row_len - end  # padding: the positions go on
        positions[r, end:] = np.arange(tail) + (positions[r, end - 1] + 1 if end else 0)
    return Batch(*(a.astype(np.int32) for a in (ids, targets, positions, document_ids)))


class KeepFloat64(TorchFunctionMode):
    """transformers computes norms and softmax in float32 whatever the model's dtype: `x.to(torch.float32)`. Under this
    mode a float64 tensor stays float64, so that a .double() model is exact; rotary tables stay float32, as in training."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in (torch.Tensor.to, torch.Tensor.type):
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def has_vision(config: transformers.PretrainedConfig) -> bool:
    return hasattr(config, "vision_config")


def is_vision(name: str, model: torch.nn.Module) -> bool:
    """Whether a parameter belongs to what sees."""
    return has_vision(model.config) and "language_model" not in name and not name.startswith("lm_head")


def model_class(config: transformers.PretrainedConfig) -> type:
    return transformers.AutoModelForImageTextToText if has_vision(config) else transformers.AutoModelForCausalLM


def eager(config: transformers.PretrainedConfig) -> dict[str, str]:
    """What from_pretrained is told so that it computes as the formulas say, in any dtype and at any size."""
    options = {"attn_implementation": "eager"}
    if hasattr(config.get_text_config(), "num_experts_per_tok") and not transformers.__version__.startswith("4."):
        options["experts_implementation"] = "eager"
    return options


def reset_dynamic_rope(model: torch.nn.Module) -> None:
    """A "dynamic" table grows with the longest document seen so far; make it depend on this batch alone."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.inv_freq = module.original_inv_freq.clone()
            module.max_seq_len_cached = module.original_max_seq_len


def packed_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """(rows, T, V), all rows in one forward. transformers finds the documents where positions do not go on by 1, if
    there is no attention mask and no cache; padding becomes a document of its own."""
    reset_dynamic_rope(model)
    positions = batch.positions.astype(np.int64)
    for row in range(len(positions)):
        padding = batch.document_ids[row] == PADDING
        positions[row, padding] = np.arange(padding.sum())
    ids, position_ids = torch.from_numpy(batch.input_ids.astype(np.int64)), torch.from_numpy(positions)
    if type(model.config).model_type in MROPE_TYPES:  # those by which documents are found, then three of each token
        position_ids = position_ids.expand(4, *position_ids.shape)
    return model(input_ids=ids, position_ids=position_ids, use_cache=False).logits


def masks(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor | None] | None:
    """Of one document, where layers attend within chunks: transformers 5 makes that mask for Llama 4 only, but each of
    its models takes the masks of its layer types. None: the model makes its own."""
    if "chunked_attention" not in (getattr(model.config, "layer_types", None) or []):
        return None
    from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask

    embeds = model.get_input_embeddings()(ids)
    return {"full_attention": create_causal_mask(model.config, embeds, None, None),
            "chunked_attention": create_chunked_causal_mask(model.config, embeds, None, None)}  # fmt: skip


def alone_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """(rows, T, V), one forward a document: no mask can be wrong. Padding gets 0."""
    out = torch.zeros(*batch.input_ids.shape, model.config.get_text_config().vocab_size, dtype=model.dtype)
    for row, begin, end in batch.documents():
        ids = torch.from_numpy(batch.input_ids[row : row + 1, begin:end].astype(np.int64))
        out[row, begin:end] = model(input_ids=ids, attention_mask=masks(model, ids), use_cache=False).logits[0]
    return out


def nll_sum(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum of -log p(target) over the targets that count; divide by N of the whole step."""
    targets = torch.from_numpy(batch.targets.astype(np.int64)).flatten()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum")


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|; 0 where both are zero."""
    a, b = a.double(), b.double()
    difference, norm = (a - b).norm().item(), b.norm().item()
    return difference / norm if norm > 0 else (0.0 if difference == 0 else float("inf"))


def write_dump(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Atomic: a reader never sees half a file. Floats are stored as F32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {name: (t.detach().float() if t.is_floating_point() else t).contiguous() for name, t in tensors.items()}
    part = path.with_name(path.name + ".tmp")
    save_file(stored, part, metadata=metadata)
    part.rename(path)

"""Tokenises documents for train_gpt: to JSONL (input_ids, labels) or to a Megatron pair (.bin, .idx).

    tokenize_data.py book.txt --tokenizer DIR --out book.jsonl
    tokenize_data.py chats.jsonl --tokenizer DIR --out chats.jsonl        loss on assistant turns only
    tokenize_data.py dataset_dir --column text --tokenizer DIR --out data.bin

Inputs, told apart by their name and first record, or by --kind:
  text      a text file; --split says what a document is: the file, a paragraph (between empty lines), or a line
  records   JSONL with the text in --column
  chat      JSONL with `messages` (and `tools`), formatted by the tokenizer's chat template; labels are -100 but for what the
            assistant says: by the template's {% generation %} marks; without them, what a conversation grows by when an
            assistant turn is added to it (with the generation prompt before it), checked token by token
  dataset   a directory of datasets.save_to_disk; its --column holds text, or messages
A text gets <s> in front if the tokenizer does that itself (--bos auto), and </s> at its end (--eos always): it is learnt where
a document ends. A chat is exactly what its template says. Plain text has no labels: all of it counts.
Everything is streamed, and appears under its name only when complete. No network is used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("USE_TORCH", "0")

import numpy as np

from common import die, parse_record

IGNORE = -100
Document = tuple[list[int], list[int] | None]  # input_ids; labels, None = all count
CHUNK = 1000  # texts tokenised at once, in parallel


# ---- writing


class JsonlWriter:
    def __init__(self, out: Path):
        self.out, self.part = out, out.with_name(out.name + ".tmp")
        self.file = self.part.open("w", encoding="utf-8")

    def write(self, document: Document) -> None:
        ids, labels = document
        record = {"input_ids": ids} | ({} if labels is None else {"labels": labels})
        self.file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def close(self) -> None:
        commit(self.file, self.part, self.out)

    def abandon(self) -> None:
        self.file.close()
        self.part.unlink(missing_ok=True)


class MegatronWriter:
    """.bin: the tokens of all documents. .idx: magic, version 1, dtype, counts, lengths (i32), byte offsets (i64),
    documents (i64: the sequence where each begins, and the end). Every document is one sequence."""

    MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
    DTYPES = {np.dtype(np.uint16): 8, np.dtype(np.int32): 4}

    def __init__(self, out: Path, vocab_size: int):
        self.dtype = np.dtype(np.uint16 if vocab_size < 65500 else np.int32)  # as Megatron chooses
        self.out, self.idx = out.with_suffix(".bin"), out.with_suffix(".idx")
        self.bin_part, self.idx_part = (p.with_name(p.name + ".tmp") for p in (self.out, self.idx))
        self.file = self.bin_part.open("wb")
        self.lengths = array("i")

    def write(self, document: Document) -> None:
        ids, labels = document
        if labels is not None:
            die("Megatron files hold no labels, and these documents have them: write JSONL (--format jsonl)")
        self.file.write(np.asarray(ids).astype(self.dtype).tobytes())
        self.lengths.append(len(ids))

    def close(self) -> None:
        lengths = np.frombuffer(self.lengths, dtype=np.int32)
        offsets = np.cumsum(lengths, dtype=np.int64) - lengths
        index = self.idx_part.open("wb")
        index.write(self.MAGIC + struct.pack("<QBQQ", self.VERSION, self.DTYPES[self.dtype], len(lengths), len(lengths) + 1))
        index.write(lengths.tobytes() + (offsets * self.dtype.itemsize).tobytes())
        index.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
        commit(self.file, self.bin_part, self.out)
        commit(index, self.idx_part, self.idx)

    def abandon(self) -> None:
        self.file.close()
        self.bin_part.unlink(missing_ok=True)
        self.idx_part.unlink(missing_ok=True)


def commit(file: Any, part: Path, out: Path) -> None:
    """On the disk first, under its name then."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    part.rename(out)


# ---- reading


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", parse_record(line, f"{path}:{number}")


def read_text(path: Path, split: str) -> Iterator[tuple[str, str]]:
    """(where, document); a paragraph keeps its inner line breaks."""
    if split == "file":
        yield str(path), path.read_text(encoding="utf-8")
        return
    lines: list[str] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                lines.append(line)
            if lines and (split == "line" or not line.strip()):
                yield f"{path}:{number}", "".join(lines).rstrip("\n")
                lines = []
    if lines:
        yield f"{path}: last paragraph", "".join(lines).rstrip("\n")


def read_dataset(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(path))
    if isinstance(dataset, DatasetDict):
        die(f"{path}: holds the splits {', '.join(dataset)}; name the directory of one, {path / next(iter(dataset))}")
    for number, record in enumerate(dataset):
        yield f"{path}: row {number}", record


def kind_of(path: Path) -> str:
    if path.is_dir():
        return "dataset"
    if path.suffix != ".jsonl":
        return "text"
    first = next(read_records(path), ("", {}))[1]
    return "chat" if "messages" in first else "records"


# ---- tokenising


class Tokeniser:
    def __init__(self, directory: Path, bos: str, eos: str):
        from transformers import AutoTokenizer

        if not directory.is_dir():
            die(f"--tokenizer {directory}: no such directory; it must hold tokenizer.json and tokenizer_config.json")
        try:
            self.hf = AutoTokenizer.from_pretrained(directory)
        except (OSError, ValueError) as e:
            die(f"--tokenizer {directory}: {e}")
        adds_bos = self.hf.bos_token_id is not None and self.hf("a")["input_ids"][:1] == [self.hf.bos_token_id]
        use_bos, use_eos = bos == "always" or (bos == "auto" and adds_bos), eos == "always"
        for wanted, name, token in ((use_bos, "bos", self.hf.bos_token_id), (use_eos, "eos", self.hf.eos_token_id)):
            if wanted and token is None:
                die(f"the tokenizer has no {name} token: use --{name} never")
        self.prefix = [self.hf.bos_token_id] if use_bos else []
        self.suffix = [self.hf.eos_token_id] if use_eos else []

    def texts(self, texts: Iterable[tuple[str, Any]]) -> Iterator[Document]:
        stream = iter(texts)
        while chunk := list(islice(stream, CHUNK)):
            for where, text in chunk:
                if not isinstance(text, str):
                    die(f"{where}: a text was expected, not {type(text).__name__}")
            for ids in self.hf([text for _, text in chunk], add_special_tokens=False)["input_ids"]:
                yield (self.prefix + ids + self.suffix if ids else []), None

    def chat(self, where: str, messages: Any, tools: Any) -> Document:
        """Labels are the ids inside assistant turns, -100 elsewhere."""
        if self.hf.chat_template is None:
            die(f"{where}: the tokenizer has no chat template")
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            die(f"{where}: messages must be a list of {{role, content}}")
        if re.search(r"\{%-?\s*generation\s*-?%\}", str(self.hf.chat_template)):
            full = self.render(where, messages, tools, return_assistant_tokens_mask=True)
            ids, mask = full["input_ids"], full["assistant_masks"]
        else:
            ids = self.render(where, messages, tools)["input_ids"]
            mask = self.mask_by_prefixes(where, messages, tools, ids)
        if not any(mask):
            die(f"{where}: no token of an assistant; nothing would be learnt from this conversation")
        return ids, [token if learnt else IGNORE for token, learnt in zip(ids, mask)]

    def render(self, where: str, messages: list[dict], tools: Any, **options: Any) -> dict[str, list[int]]:
        try:
            return self.hf.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, **options)
        except Exception as e:  # templates raise what they like, jinja2's errors among others
            die(f"{where}: the chat template refuses the conversation: {e}")

    def mask_by_prefixes(self, where: str, messages: list[dict], tools: Any, ids: list[int]) -> list[bool]:
        mask = [False] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(where, messages[:i], tools, add_generation_prompt=True)["input_ids"] if i else []
            after = self.render(where, messages[: i + 1], tools)["input_ids"]
            for prefix in (before, after):
                if ids[: len(prefix)] != prefix:
                    die(f"{where}: up to message {i} the conversation is tokenised otherwise than within the whole (the template "
                        "rewrites earlier turns): mark assistant turns in it with {% generation %}")  # fmt: skip
            mask[len(before) : len(after)] = [True] * (len(after) - len(before))
        return mask


def tokenise(path: Path, kind: str, args: argparse.Namespace, tokeniser: Tokeniser) -> Iterator[Document]:
    if kind == "text":
        yield from tokeniser.texts(read_text(path, args.split))
        return
    records = read_dataset(path) if kind == "dataset" else read_records(path)
    column = args.column or ("messages" if kind == "chat" else "text")
    first = next(records, None)
    if first is None:
        return
    if column not in first[1]:
        die(f'{first[0]}: no column "{column}"; there are {", ".join(first[1])} (--column)')
    values = ((where, record.get(column), record.get("tools")) for records in ([first], records) for where, record in records)
    if isinstance(first[1][column], list):
        for where, messages, tools in values:
            yield tokeniser.chat(where, messages, tools)
    else:
        yield from tokeniser.texts((where, text) for where, text, _ in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path, nargs="+", metavar="INPUT")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="a local directory, as of save_pretrained")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".jsonl, or .bin (and .idx beside it)")
    parser.add_argument("--format", choices=("auto", "jsonl", "megatron"), default="auto", help="auto: by the name of --out")
    parser.add_argument("--kind", choices=("auto", "text", "records", "chat", "dataset"), default="auto")
    parser.add_argument("--column", help="default: messages for chat, text otherwise")
    parser.add_argument("--split", choices=("file", "paragraph", "line"), default="file", help="of text files, default: %(default)s")
    parser.add_argument("--bos", choices=("auto", "always", "never"), default="auto", help="of texts, default: %(default)s")
    parser.add_argument("--eos", choices=("always", "never"), default="always", help="of texts, default: %(default)s")
    args = parser.parse_args()
    for path in args.inputs:
        if not path.exists():
            die(f"{path}: no such file or directory")
        if path.resolve() == args.out.resolve():
            die(f"{path}: is the output, too")

    tokeniser = Tokeniser(args.tokenizer, args.bos, args.eos)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    megatron = args.format == "megatron" or (args.format == "auto" and args.out.suffix in (".bin", ".idx"))
    writer = MegatronWriter(args.out, len(tokeniser.hf)) if megatron else JsonlWriter(args.out)
    documents = tokens = learnt = empty = 0
    try:
        for path in args.inputs:
            for ids, labels in tokenise(path, kind_of(path) if args.kind == "auto" else args.kind, args, tokeniser):
                if not ids:
                    empty += 1
                    continue
                writer.write((ids, labels))
                documents, tokens = documents + 1, tokens + len(ids)
                learnt += len(ids) if labels is None else sum(label != IGNORE for label in labels)
        if documents == 0:
            die(f"no document in {', '.join(map(str, args.inputs))}")
        writer.close()
    except (OSError, UnicodeDecodeError) as e:
        die(f"{path}: {e}")
    finally:
        writer.abandon()
    note = f"; {empty} empty documents left out" if empty else ""
    print(f"{writer.out}: {documents} documents, {tokens} tokens, {learnt} of them with loss{note}")


if __name__ == "__main__":
    main()

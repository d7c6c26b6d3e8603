"""What every script shares and needs no torch: how to end with an error, and how to read a JSONL log."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn


def die(message: str) -> NoReturn:
    """A clear end: one line on stderr, exit code 1."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    sys.exit(1)


def parse_record(line: str | bytes, where: str) -> dict[str, Any]:
    """One line of a JSONL file: an object, or the end."""
    try:
        record = json.loads(line)
    except ValueError as e:
        die(f"{where}: not valid JSON: {e}")
    if not isinstance(record, dict):
        die(f"{where}: a JSON object was expected, not {type(record).__name__}")
    return record


def read_log(path: Path, key: str) -> dict[int, float]:
    """{step: value of `key`} of a training log; null is nan; a half-written last line is left out."""
    if not path.is_file():
        die(f"{path}: no such file")
    lines = path.read_text().splitlines(keepends=True)
    values: dict[int, float] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == len(lines) and not line.endswith("\n")):
            continue
        record = parse_record(line, f"{path}:{number}")
        if isinstance(record.get("step"), int) and key in record:
            values[record["step"]] = math.nan if record[key] is None else float(record[key])
    return values

"""Turns the JSONL log of a run into TensorBoard events, and into a W&B run; also while the run goes on.

    .venv/bin/python scripts/export_log.py checkpoints/log.jsonl --out runs/first --follow
    tensorboard --logdir runs

Every number of a line becomes a scalar at its "step". With --follow it keeps reading until Ctrl-C: a line that is only
half written waits for the rest. Where a resumed run has written steps again, TensorBoard is told to forget the old ones.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from common import die, parse_record

Line = tuple[int, dict[str, float]]  # step, scalars


class LogReader:
    """Complete lines of a file that grows, and that may be cut and written again."""

    def __init__(self, path: Path):
        self.path, self.offset, self.number, self.last = path, 0, 0, b""

    def read_new(self) -> Iterator[Line]:
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self.last))
            if file.read(len(self.last)) != self.last:  # no longer what was read: the run was resumed, or another began
                self.offset, self.number, self.last = 0, 0, b""
                file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset, self.number, self.last = self.offset + len(line), self.number + 1, line
                if line.strip():
                    yield self.parse(line)

    def parse(self, line: bytes) -> Line:
        where = f"{self.path}:{self.number}"
        record = parse_record(line, where)
        if not isinstance(record.get("step"), int):
            die(f'{where}: no "step"')
        scalars = {k: float(v) for k, v in record.items() if k != "step" and isinstance(v, (int, float)) and not isinstance(v, bool)}
        return record["step"], scalars


class TensorBoard:
    def __init__(self, out: Path):
        self.out = out
        self.writer = SummaryWriter(str(out)) if not list(out.glob("events.*")) else None  # else: purge at the first step

    def rewind(self, step: int) -> None:
        """What was written at `step` and later does not count any more."""
        if self.writer:
            self.writer.close()
        self.writer = SummaryWriter(str(self.out), purge_step=step)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if self.writer is None:
            self.rewind(step)
        for key, value in scalars.items():
            self.writer.add_scalar(key, value, step)

    def flush(self) -> None:
        if self.writer:
            self.writer.flush()

    def close(self) -> None:
        if self.writer:
            self.writer.close()


class Wandb:
    """W&B only goes forward; with an own x axis, a step that is written again is drawn where it belongs."""

    def __init__(self, project: str, name: str):
        try:
            import wandb
        except ImportError:
            die("--wandb: the package wandb is not installed: pip install wandb")
        self.run = wandb.init(project=project, name=name)
        self.run.define_metric("train_step")
        self.run.define_metric("*", step_metric="train_step")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self.run.log({"train_step": step, **scalars})

    def close(self) -> None:
        self.run.finish()


class Exporter:
    def __init__(self, board: TensorBoard, wandb: Wandb | None):
        self.board, self.wandb = board, wandb
        self.written: dict[int, dict[str, float]] = {}
        self.latest = -1

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """A line that was exported before is skipped; one that says something else replaces it and all that follow."""
        before = self.written.get(step, {})
        if scalars.items() <= before.items():
            return
        if step < self.latest or any(key in before for key in scalars):
            self.board.rewind(step)
            self.written = {s: v for s, v in self.written.items() if s < step}
        self.written.setdefault(step, {}).update(scalars)
        self.latest = step
        self.board.write(step, scalars)
        if self.wandb:
            self.wandb.write(step, scalars)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, metavar="LOG.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the TensorBoard events")
    parser.add_argument("--follow", action="store_true", help="go on as the file grows; wait for it if need be")
    parser.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="how often --follow looks, default: %(default)s")
    parser.add_argument("--wandb", metavar="PROJECT", help="also a W&B run of this project")
    args = parser.parse_args()
    if not args.follow and not args.log.is_file():
        die(f"{args.log}: no such file")

    exporter = Exporter(TensorBoard(args.out), Wandb(args.wandb, args.log.stem) if args.wandb else None)
    reader = LogReader(args.log)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while True:
            if args.log.is_file():
                for step, scalars in reader.read_new():
                    exporter.add(step, scalars)
                exporter.board.flush()
            if not args.follow:
                break
            time.sleep(args.every)
    except KeyboardInterrupt:
        pass
    exporter.board.close()
    if exporter.wandb:
        exporter.wandb.close()
    print(f"{args.out}: {len(exporter.written)} steps")


if __name__ == "__main__":
    main()

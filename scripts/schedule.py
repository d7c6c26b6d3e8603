"""The learning rate of every step: the definition that the trainer's schedules are checked against."""

from __future__ import annotations

import math

NAMES = ("constant", "linear", "cosine", "wsd")


def lr_at(step: int, steps: int, lr: float, name: str, warmup_steps: int = 0, min_lr_ratio: float = 0.1,
          decay_ratio: float = 0.2) -> float:  # fmt: skip
    """The rate of step `step`, which counts from 0, of `steps`. W = warmup_steps.

    warm-up         lr (step + 1) / W for step < W: the first step learns, step W - 1 has lr
    linear, cosine  lr at step W, lr min_lr_ratio at the last step (one step after a warm-up has the end's value; a run of one step has lr)
    wsd             lr, then D = round(decay_ratio steps) steps, at most steps - W, go down in a line; the last has lr min_lr_ratio
    """
    if name not in NAMES:
        raise ValueError(f'schedule.name is "{name}"; there are {", ".join(NAMES)}')
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    last = steps - 1
    if name == "constant":
        progress = 0.0
    elif name == "wsd":
        decay_steps = min(math.floor(decay_ratio * steps + 0.5), steps - warmup_steps)
        progress = max(0.0, (step - (last - decay_steps)) / decay_steps) if decay_steps > 0 else 0.0
    else:
        progress = (step - warmup_steps) / (last - warmup_steps) if last > warmup_steps else float(steps > 1)
    progress = min(progress, 1.0)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if name == "cosine" else 1 - progress
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * left)

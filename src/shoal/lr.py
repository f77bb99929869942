"""Learning-rate schedules as factories over torch's LambdaLR; any function `optimizer -> LRScheduler` serves as well."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from shoal.errors import UserError, did_you_mean

Schedule = Callable[[Optimizer], LRScheduler]


def _constant(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1))


def _linear(step: int, total: int, warmup: int, floor: float) -> float:
    done = min(1.0, max(0, step - warmup) / max(1, total - warmup))
    return _constant(step, warmup) * (1 - (1 - floor) * done)


def _cosine(step: int, total: int, warmup: int, floor: float) -> float:
    done = min(1.0, max(0, step - warmup) / max(1, total - warmup))
    return _constant(step, warmup) * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def constant(warmup: int = 0) -> Schedule:
    """Linear warm-up over `warmup` steps (step s runs at (s + 1) / (warmup + 1)), then the optimizer's learning rate."""
    return partial(LambdaLR, lr_lambda=partial(_constant, warmup=warmup))


def linear(total: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Warm-up, then a straight line to `floor` times the learning rate at step `total`, constant after it."""
    return partial(LambdaLR, lr_lambda=partial(_linear, total=total, warmup=warmup, floor=floor))


def cosine(total: int, warmup: int = 0, floor: float = 0.1) -> Schedule:
    """Warm-up, then half a cosine to `floor` times the learning rate at step `total`, constant after it (arXiv 1608.03983)."""
    return partial(LambdaLR, lr_lambda=partial(_cosine, total=total, warmup=warmup, floor=floor))


def by_name(name: str, total: int, warmup: int, floor: float) -> Schedule:
    """The schedule of a job file: "constant", "linear" or "cosine"."""
    schedules = {"constant": constant(warmup), "linear": linear(total, warmup, floor), "cosine": cosine(total, warmup, floor)}
    if name not in schedules:
        raise UserError(f'schedule "{name}" is not one of {", ".join(schedules)}.{did_you_mean(name, list(schedules))}')
    return schedules[name]

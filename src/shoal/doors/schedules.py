"""DeepSpeed's learning-rate schedules: a rate for each iteration. The first step runs at iteration -1.

The formulas are those of deepspeed.runtime.lr_schedules (0.19). They step after each update, but not after an overflow.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer

from shoal.errors import UserError, check_choice, check_names

LARGEST = 1e300
"""Bound of a configuration's numbers, so that their products are finite."""

Rule = Callable[[int, float], float]
"""(iteration, the optimizer's own rate) -> rate"""


class Schedule:
    """Sets the rate of each group of `optimizer` by `rule`, and Adam's first beta by `beta(iteration)`, if given."""

    def __init__(self, optimizer: Optimizer, rule: Rule, beta: Callable[[int], float] | None = None) -> None:
        self.optimizer, self._rule = optimizer, rule
        self._beta = beta if "betas" in optimizer.defaults else None
        self._own = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_batch_iteration = -1
        self._set()

    def step(self) -> None:
        """Sets the next iteration's rates; called after each update."""
        self.last_batch_iteration += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        self._set()

    def _set(self) -> None:
        for group, own in zip(self.optimizer.param_groups, self._own, strict=True):
            group["lr"] = self._rule(self.last_batch_iteration, own)
            if self._beta is not None:
                group["betas"] = (self._beta(self.last_batch_iteration), 0.99)


def schedule(name: str, parameters: Mapping[str, Any]) -> Callable[[Optimizer], Schedule]:
    """Returns a factory of DeepSpeed's schedule `name`. Raises UserError for an unknown name, and for unknown, missing
    or invalid parameters."""
    check_choice(f'scheduler.type = "{name!s:.100}" is not one of', name, SCHEDULES)
    known = inspect.signature(SCHEDULES[name]).parameters
    check_names(f"{name} has no parameter", parameters, known)
    for key, each in known.items():
        if each.default is inspect.Parameter.empty and key not in parameters:
            raise UserError(f"scheduler.params: {name} needs {key}")
    return SCHEDULES[name](**{key: _value(key, value, known[key].default) for key, value in parameters.items()})


def _value(key: str, value: Any, default: Any) -> Any:
    """Returns `value` with the type of the parameter `key`; a number of steps may be written as 1e4."""
    said = f"scheduler.params.{key} = {value!r:.100}"
    if value is None and default is None:
        return None
    if isinstance(default, bool | str):
        if type(value) is not type(default):
            raise UserError(f"{said}: give {'true or false' if isinstance(default, bool) else 'a text'}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
        raise UserError(f"{said}: give a number")
    if not key.endswith(("_steps", "_size", "_count")):
        return value
    if value != int(value) or not 0 <= value < 2**53:
        raise UserError(f"{said}: give a whole number, 0 or more")
    return int(value)


def _warmed(iteration: int, steps: int, kind: str) -> float:
    """Returns the progress of the warm-up, 0 to 1."""
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


def _steps(number: int, kind: str) -> int:
    if number < 1:
        raise UserError(f"scheduler.params.warmup_num_steps = {number!r}: give a whole number of at least 1")
    if kind not in ("log", "linear"):
        raise UserError(f'scheduler.params.warmup_type = "{kind}": give "log" or "linear"')
    return max(2, number)


def _warmup_lr(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Callable[[Optimizer], Schedule]:
    """Raises the rate from the smallest to the largest (by default the optimizer's own), then keeps it."""
    steps = _steps(warmup_num_steps, warmup_type)

    def rule(iteration: int, own: float) -> float:
        top = own if warmup_max_lr is None else warmup_max_lr
        if iteration < 0:
            return warmup_min_lr
        done = _warmed(iteration, steps, warmup_type) if iteration < steps else 1.0
        return warmup_min_lr + (top - warmup_min_lr) * done

    return partial(Schedule, rule=rule)


def _warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Callable[[Optimizer], Schedule]:
    """Warms up, then decays linearly to the smallest rate at `total_num_steps`."""
    steps = _steps(warmup_num_steps, warmup_type)

    def rule(iteration: int, own: float) -> float:
        if iteration < 0:
            return warmup_min_lr
        left = max(0.0, (total_num_steps - iteration) / max(1.0, total_num_steps - steps))
        share = _warmed(iteration, steps, warmup_type) if iteration < steps else left
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share

    return partial(Schedule, rule=rule)


def _warmup_cosine_lr(
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Callable[[Optimizer], Schedule]:
    """Warms up, then decays by half a cosine; ratios are relative to the optimizer's own rate."""
    steps = _steps(warmup_num_steps, warmup_type)

    def rule(iteration: int, own: float) -> float:
        if iteration < 0:
            return 0.0
        if iteration < steps:
            return own * (warmup_min_ratio + (1 - warmup_min_ratio) * _warmed(iteration, steps, warmup_type))
        done = min(1.0, (iteration - steps + 1) / max(1, total_num_steps - steps))
        return own * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)

    return partial(Schedule, rule=rule)


def _one_cycle(
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> Callable[[Optimizer], Schedule]:
    """Moves the rate up and down, Adam's first beta down and up, then decays both (arXiv 1803.09820)."""
    first = cycle_first_step_size
    second = first if cycle_second_step_size is None else cycle_second_step_size
    stairs = (
        cycle_first_stair_count,
        cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
    )
    if decay_lr_rate < 0 or decay_mom_rate < 0:
        raise UserError(
            f"scheduler.params: decay_lr_rate = {decay_lr_rate}, decay_mom_rate = {decay_mom_rate}: give 0 or more"
        )
    if first < 1 or second < 0:
        raise UserError(f"scheduler.params: OneCycle with halves of {first} and {second} steps")

    def height(iteration: int) -> float:
        """Returns the height in the cycle: 0 at both ends, 1 where its halves meet."""
        position = (iteration + 1) % (first + second)
        rises = position <= first
        share, count = (position / first, stairs[0]) if rises else ((first + second - position) / second, stairs[1])
        return math.floor(share * count) / count if count > 0 else share

    def decayed(iteration: int, rate: float) -> float:
        past = iteration - (first + second) + 1
        return 1 + rate * past / decay_step_size if decay_step_size else 1.0

    def rule(iteration: int, own: float) -> float:
        if iteration < first + second:
            return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * (height(iteration) if iteration >= 0 else 0.0)
        return cycle_min_lr / decayed(iteration, decay_lr_rate)

    def beta(iteration: int) -> float:
        if iteration < 0:
            return cycle_min_mom  # where DeepSpeed starts
        if iteration < first + second:
            return cycle_max_mom - (cycle_max_mom - cycle_min_mom) * height(iteration)
        return cycle_max_mom * decayed(iteration, decay_mom_rate)

    return partial(Schedule, rule=rule, beta=beta if cycle_momentum else None)


def _lr_range_test(
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Callable[[Optimizer], Schedule]:
    """Raises the rate steadily, to find the one that is too large."""
    if lr_range_test_step_size < 1:
        raise UserError("scheduler.params.lr_range_test_step_size = 0: give at least 1")

    def rule(iteration: int, own: float) -> float:
        interval = (iteration + 1) / lr_range_test_step_size
        return lr_range_test_min_lr * (
            1 + lr_range_test_step_rate * (math.floor(interval) if lr_range_test_staircase else interval)
        )

    return partial(Schedule, rule=rule)


SCHEDULES: dict[str, Callable[..., Callable[[Optimizer], Schedule]]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _lr_range_test,
}

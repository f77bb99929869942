"""Learning-rate schedules, as factories over torch's LambdaLR; any function `optimizer -> LRScheduler` serves too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from shoal.errors import UserError, check_choice

Schedule = Callable[[Optimizer], LRScheduler]


def check_scheduler(scheduler: Any) -> None:
    """Raises UserError for a scheduler that a step cannot call."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserError(
            "ReduceLROnPlateau needs a metric at each step, which the engine does not have: lower the lr from your own "
            "loop"
        )


def _constant(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1))


def _linear(step: int, total: int, warmup: int, floor: float) -> float:
    done = min(1.0, max(0, step - warmup) / max(1, total - warmup))
    return _constant(step, warmup) * (1 - (1 - floor) * done)


def _cosine(step: int, total: int, warmup: int, floor: float) -> float:
    done = min(1.0, max(0, step - warmup) / max(1, total - warmup))
    return _constant(step, warmup) * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))


def constant(warmup: int = 0) -> Schedule:
    """Linear warm-up over `warmup` steps (step s runs at (s + 1) / (warmup + 1)), then the full learning rate."""
    return partial(LambdaLR, lr_lambda=partial(_constant, warmup=warmup))


def linear(total: int, warmup: int = 0, floor: float = 0.0) -> Schedule:
    """Warm-up, then a straight line to `floor` times the learning rate at step `total`, constant after it."""
    return partial(LambdaLR, lr_lambda=partial(_linear, total=total, warmup=warmup, floor=floor))


def cosine(total: int, warmup: int = 0, floor: float = 0.1) -> Schedule:
    """Warm-up, half a cosine to `floor` times the learning rate at step `total`, then constant (arXiv 1608.03983)."""
    return partial(LambdaLR, lr_lambda=partial(_cosine, total=total, warmup=warmup, floor=floor))


def by_name(name: str, total: int, warmup: int, floor: float) -> Schedule:
    """Makes the schedule of a job file: "constant", "linear" or "cosine"."""
    schedules = {
        "constant": constant(warmup),
        "linear": linear(total, warmup, floor),
        "cosine": cosine(total, warmup, floor),
    }
    check_choice(f'train.schedule = "{name}" is not one of', name, schedules)
    return schedules[name]


PLACE = ("last_epoch", "_step_count", "_last_lr", "base_lrs", "_get_lr_called_within_step", "_is_initial", "verbose")
"""Keys of a scheduler's state that say where it is, or the learning rates; the others say which schedule it is."""


class Course:
    """Records `scheduler` as given, for checkpoints, and continues it from any step. Made before its first step.

    given: the options of each of the optimizer's groups, as they were before there was a schedule.
    """

    def __init__(self, scheduler: LRScheduler, given: Sequence[Mapping[str, Any]]) -> None:
        self._scheduler = scheduler
        # A step counts that updates nothing, for an overflow or no labels; torch warns where the first one is such.
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._fresh = deepcopy(scheduler.state_dict())
        self._options = [
            {key: deepcopy(value) for key, value in each.items() if key != "params"} for each in self._groups
        ]
        self._own = set.intersection(*map(set, given)) - {"lr"}
        self._moved = self._other_than(given)  # by the schedule's constructor

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._scheduler.optimizer.param_groups

    def about(self) -> dict[str, Any]:
        """Describes the schedule in JSON: class and settings. A function of the step is known by its name alone."""
        settings = _settings(self._fresh)
        if isinstance(self._scheduler, LambdaLR):
            found = [_function(each) for each in self._scheduler.lr_lambdas]
            settings["lr_lambdas"] = found if any(each != found[0] for each in found) else found[:1]
        about = {"class": type(self._scheduler).__name__, **settings}
        return json.loads(json.dumps(about, default=lambda value: type(value).__name__))

    def begin_at(self, step: int) -> None:
        """Sets learning rates, and what else the schedule moves, to their values `step` steps after its start. Other
        options of the optimizer stay: a weight decay that the loop has set, what an optimizer counts in its groups."""
        before, moved = [dict(group) for group in self._groups], set(self._moved)
        for group, fresh in zip(self._groups, self._options, strict=True):
            group.update(deepcopy(fresh))
        self._scheduler.load_state_dict(deepcopy(self._fresh))
        jump = isinstance(self._scheduler, LambdaLR) and step > 0  # a function of the step: no need to walk there
        if jump:
            self._scheduler.last_epoch, self._scheduler._step_count = step - 1, step
        for _ in range(1 if jump else step):
            self._scheduler.step()
            moved |= self._other_than(self._options)
        for group, then in zip(self._groups, before, strict=True):
            group.update({key: then[key] for key in self._own - moved})

    def _other_than(self, options: Sequence[Mapping[str, Any]]) -> set[str]:
        """Keys of the optimizer's own whose values are other ones than in the `options` of its groups."""
        pairs = zip(self._groups, options, strict=True)
        return {key for group, other in pairs for key in self._own if group[key] != other[key]}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Takes over a state of the same schedule. Functions of the step are called anew: they may have changed."""
        self._scheduler.load_state_dict(dict(saved))
        if isinstance(self._scheduler, LambdaLR):
            self.begin_at(saved["last_epoch"])


def _settings(state: Any) -> Any:
    """Removes the keys PLACE from `state`, also in schedulers inside."""
    if isinstance(state, Mapping):
        return {key: _settings(value) for key, value in state.items() if key not in PLACE}
    return [_settings(each) for each in state] if isinstance(state, list | tuple) else state


def _function(each: Callable[[int], float]) -> dict[str, Any]:
    inner = each.func if isinstance(each, partial) else each
    given = each.keywords if isinstance(each, partial) else getattr(each, "__dict__", {})
    return {"function": getattr(inner, "__name__", type(inner).__name__).strip("_"), **given}

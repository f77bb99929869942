"""Loss scaling for fp16: the loss is multiplied before backward, so that small gradients do not underflow.

Gradients are divided again as they are reduced. A step whose gradients overflowed is skipped and, if the scale is
dynamic, the scale is halved. The rule is DeepSpeed's (`DynamicLossScaler`), kept on the device, so that the host need
not wait for a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import ArgumentError, UserError

STATIC_PATIENCE = 20
"""Consecutive overflows after which a static scale is given up."""


@dataclass(frozen=True)
class Scaling:
    """The rule of the loss scale.

    - `loss_scale`: a static scale; 0 for a dynamic one
    - `initial_scale_power`: a dynamic scale begins at 2 ** `initial_scale_power`
    - `loss_scale_window`: it doubles after this many steps without an overflow
    - `hysteresis`: it halves at an overflow, once `hysteresis` - 1 overflows were tolerated since it doubled
    - `min_loss_scale`: it never gets smaller
    """

    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1

    def __post_init__(self) -> None:
        for key, most in (("loss_scale", 2.0**1000), ("min_loss_scale", 2.0**1000), ("initial_scale_power", 1000)):
            value = getattr(self, key)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value <= most:
                raise UserError(f"precision: {key} = {value!r:.100}: give a number, at most {most:g}")
        for key in ("initial_scale_power", "loss_scale_window", "hysteresis"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**53:
                raise UserError(f"precision: {key} = {value!r:.100}: give a whole number")
        for key in ("loss_scale", "initial_scale_power"):
            if getattr(self, key) < 0:
                raise ArgumentError("precision", f": {key} = {getattr(self, key)}: give 0 or more")
        for key in ("loss_scale_window", "hysteresis"):
            if getattr(self, key) < 1:
                raise ArgumentError("precision", f": {key} = {getattr(self, key)}: give at least 1")
        if self.min_loss_scale <= 0:
            raise ArgumentError("precision", f": min_loss_scale = {self.min_loss_scale}: give a number above 0")


class LossScale:
    """The loss scale of a run, as 0-dim fp64 tensors on `device`.

    `scale`: of the next step. `skipped`: steps so far whose gradients overflowed. `stuck`: whether the last one
    overflowed where the scale cannot get smaller.
    """

    def __init__(self, scaling: Scaling, device: torch.device) -> None:
        self._scaling = scaling
        start = scaling.loss_scale or 2.0**scaling.initial_scale_power
        self._state = torch.tensor([start, 0, scaling.hysteresis, 0, 0], dtype=torch.float64, device=device)

    @property
    def scale(self) -> Tensor:
        return self._state[0]

    @property
    def skipped(self) -> Tensor:
        return self._state[3]

    @property
    def stuck(self) -> Tensor:
        return self._state[4] > 0

    def update(self, overflow: Tensor) -> None:
        """Updates the scale after a step; `overflow` (0-dim bool): whether its gradients were not finite."""
        rule = self._scaling
        scale, good, credit, skipped, stuck = self._state.unbind()
        if rule.loss_scale:
            in_a_row = torch.where(overflow, good + 1, 0.0)
            self._state = torch.stack(
                [scale, in_a_row, credit, skipped + overflow, (in_a_row >= STATIC_PATIENCE).double()]
            )
            return
        halves = overflow & (credit <= 1)
        good = torch.where(overflow, 0.0, good + 1)
        doubles = ~overflow & (good % rule.loss_scale_window == 0)
        smaller = (scale / 2).clamp(min=rule.min_loss_scale)
        stuck = (halves & (smaller >= scale)).double()
        new = torch.where(halves, smaller, torch.where(doubles, scale * 2, scale))
        credit = torch.where(overflow & ~halves, credit - 1, torch.where(doubles, float(rule.hysteresis), credit))
        self._state = torch.stack([new, good, credit, skipped + overflow, stuck])

    def state(self) -> list[float]:
        """Returns the numbers that a checkpoint holds."""
        return self._state.tolist()

    def load(self, state: list[float]) -> None:
        """Goes on from the numbers of a checkpoint, by the rule that is given now: a static scale is the one given."""
        rule, (scale, good, credit, skipped, stuck) = self._scaling, state
        if rule.loss_scale and scale != rule.loss_scale:
            scale, good, stuck = rule.loss_scale, 0.0, 0.0
        state = [scale, good, min(credit, rule.hysteresis), skipped, stuck]
        self._state = torch.tensor(state, dtype=torch.float64, device=self._state.device)

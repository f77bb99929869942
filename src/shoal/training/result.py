"""What a step gives back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from shoal.comm.wire import sent
from shoal.device import to_host


@sent
@dataclass(repr=False)
class StepResult:
    """What a step did, the same on every rank. Reading a number waits until the device has found it, which is before
    the update; not reading costs nothing.

    Where replicas train alone (see exchange.Holds) the numbers are of this rank's `share` of the global batch, 1
    otherwise; where only clipping is local, `grad_norm` is.

    - `loss`: mean over the global batch, without auxiliary losses (those are in `aux`)
    - `grad_norm`: before clipping
    - `count`: the global count, whatever the loss counts; `tokens`: the same as a whole number
    - `lr`: of each optimizer group
    - `seconds`: of this rank's call
    - `tokens_per_expert`: of each layer with experts, how often each was chosen; [] without experts
    - `dropped`: the part of those choices that capacity has not let through; None without experts
    - `norms`: of the gradient of each parameter, by name and before clipping, so that the root of the sum of their
      squares is `grad_norm`; {} in steps for which they were not asked
    """

    step: int
    epoch: int
    lr: tuple[float, ...]
    seconds: float
    _totals: Tensor
    _norm: Tensor
    _aux_names: tuple[str, ...] = field(default=())
    share: float = 1.0
    _scale: Tensor | None = None
    _experts: Sequence[Tensor] = ()
    _waits: Sequence[Callable[[], object]] = ()  # return once the numbers can be read
    norms: Mapping[str, float] = field(default_factory=dict)
    _expected: float = 1.0  # what sums were divided by before backward

    def to_wire(self) -> list[Any]:
        """Returns all fields, for another rank; waits for the numbers."""
        self._wait()
        return [getattr(self, each.name) for each in fields(self)]

    def __repr__(self) -> str:
        """The numbers that a person asks for, which waits for them."""
        more = "".join(f", {name}={value:.4g}" for name, value in self.aux.items()) + (
            ", skipped" if self.skipped else ""
        )
        numbers = (
            f"loss={self.loss:.4f}, grad_norm={self.grad_norm:.4g}, tokens={self.tokens:,}, seconds={self.seconds:.3g}"
        )
        return f"StepResult(step={self.step}, {numbers}{more})"

    def _send(self) -> None:
        """Lets the numbers leave for the host, which later waits for them alone."""
        scale = () if self._scale is None else (self._scale,)
        (self._totals, self._norm, *more), events = to_host(self._totals, self._norm, *scale, *self._experts)
        self._scale = more.pop(0) if scale else None
        self._experts = more
        self._waits = (*self._waits, *(event.synchronize for event in events))

    def _wait(self) -> None:
        for wait in self._waits:
            wait()
        self._waits = ()

    @property
    def _sums(self) -> Tensor:
        self._wait()
        return self._totals

    @property
    def _counts(self) -> Sequence[Tensor]:
        self._wait()
        return self._experts

    @property
    def tokens_per_expert(self) -> list[list[int]]:
        return [[round(count) for count in layer[:-1].tolist()] for layer in self._counts]

    @property
    def imbalance(self) -> float | None:
        """How many times the mean of its layer the busiest expert was chosen, a mean over the layers; None without
        experts."""
        layers = [layer for layer in self.tokens_per_expert if sum(layer)]
        return sum(max(layer) * len(layer) / sum(layer) for layer in layers) / len(layers) if layers else None

    @property
    def dropped(self) -> float | None:
        if not self._experts:
            return None
        chosen, dropped = (
            float(sum(part.sum() for part in parts))
            for parts in zip(*((e[:-1], e[-1:]) for e in self._counts), strict=True)
        )
        return dropped / max(1.0, chosen)

    @property
    def count(self) -> float:
        return float(self._sums[1])

    @property
    def tokens(self) -> int:
        return round(self.count)

    @property
    def loss(self) -> float:
        return float(self._sums[0]) / self.count if self.count else math.nan

    @property
    def to_mean(self) -> float:
        """What turns a gradient that backward has left beside the engine's parameters into that of the mean loss."""
        return self._expected / (self.count * (self.loss_scale or 1.0)) if self.count else 0.0

    @property
    def loss_scale(self) -> float | None:
        """What the loss was multiplied with before backward; None without loss scaling."""
        self._wait()
        return None if self._scale is None else float(self._scale)

    @property
    def skipped(self) -> bool:
        """Whether gradients overflowed under loss scaling, so that nothing was updated."""
        return self._scale is not None and bool(self._overflow())

    def _overflow(self) -> Tensor:
        """Whether there is something to learn from and it is not finite (0-dim)."""
        loss, count = self._sums[:2]
        return ~(torch.isfinite(self._norm) & torch.isfinite(loss)) & (count > 0)

    @property
    def grad_norm(self) -> float:
        self._wait()
        return float(self._norm)

    @property
    def aux(self) -> dict[str, float]:
        values = self._sums[2:].tolist()
        return {name: value / (self.count or 1.0) for name, value in zip(self._aux_names, values, strict=False)}

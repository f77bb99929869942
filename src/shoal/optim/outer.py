"""Outer optimizers: they take the mean movement of replicas or clients that trained alone, anchor - x, as the gradient
of an update of the anchor, from which all go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.errors import ArgumentError


class Outer(Protocol):
    """An update of a flat anchor. `slots`: names of the state that it keeps, each of the anchor's shape, at first 0."""

    @property
    def slots(self) -> tuple[str, ...]: ...

    def step(self, anchor: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        """Updates `anchor` and `state` in place; `moved` is used up."""


@dataclass(frozen=True)
class OuterSGD:
    """SGD with momentum: v <- momentum v + moved; anchor <- anchor - lr v, with Nesterov - lr (moved + momentum v).

    lr = 1 without momentum makes the anchor the mean of the replicas.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _above_zero("lr", self.lr)
        _below_one("momentum", self.momentum)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def step(self, anchor: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        if self.momentum:
            velocity = state["momentum"]
            velocity.mul_(self.momentum).add_(moved)
            moved = moved.add_(velocity, alpha=self.momentum) if self.nesterov else velocity
        anchor.sub_(moved, alpha=self.lr)


@dataclass(frozen=True)
class OuterAdam:
    """Adam as FedAdam has it (https://arxiv.org/abs/2003.00295, algorithm 2), without correction of the bias:
    m <- beta1 m + (1 - beta1) moved; v <- beta2 v + (1 - beta2) moved^2; anchor <- anchor - lr m / (sqrt(v) + tau).
    """

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _above_zero("lr", self.lr)
        _above_zero("tau", self.tau)
        _below_one("beta1", self.beta1)
        _below_one("beta2", self.beta2)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("first", "second")

    def step(self, anchor: Tensor, moved: Tensor, state: Mapping[str, Tensor]) -> None:
        first, second = state["first"], state["second"]
        first.lerp_(moved, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(moved, moved, value=1 - self.beta2)
        anchor.addcdiv_(first, second.sqrt().add_(self.tau), value=-self.lr)


def _above_zero(name: str, value: float) -> None:
    if not value > 0:
        raise ArgumentError(name, f" = {value}: give a number above 0")


def _below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ArgumentError(name, f" = {value}: give a number from 0 to below 1")

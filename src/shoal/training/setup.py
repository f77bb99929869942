"""What a step is given: the ranks that it speaks with, and what it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.chunks import value_of
from shoal.comm import Group
from shoal.exchange import Algorithm
from shoal.exchange.hooks import UserHooks
from shoal.optim.optimizer import ChunkOptimizer
from shoal.parallel.axis import Axis
from shoal.precision import LossScale


@dataclass(frozen=True)
class StepGroups:
    """The groups of a step.

    - `replicas`: the ranks among whom samples, and tokens of a row, are shared out
    - `partners`: those of them that update together
    - `axes`: those along which ranks with other parts of the model speak with each other
    """

    replicas: Group
    partners: Group
    axes: Sequence[Axis] = ()

    def squared_norm(self, squares: Tensor) -> Tensor:
        """Gives the squared norm of the whole model's gradient, from the exact sum over what is here of it."""
        for axis in self.axes:
            squares = axis.add_squares(squares)
        return value_of(squares)


class Buddy(Protocol):
    """Is told what updates are made with, so that others can make them again (see checkpoint.buddy)."""

    def begin(self, step: int) -> None: ...
    def log(self, step: int, touched: Mapping[str, bool]) -> None: ...
    def made(self, step: int, factor: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None: ...
    def follow(self) -> None: ...


@dataclass(frozen=True)
class Trained:
    """What a step trains, and by what.

    - `hooks`: those that users have put on the `parameters`
    - `algorithm`: how replicas agree on an update
    - `scheduler`: stepped once a step
    - `scale`: what the loss is multiplied by, where gradients are fp16
    - `buddy`: None where no state is kept twice
    """

    parameters: Mapping[str, nn.Parameter]
    hooks: UserHooks
    algorithm: Algorithm
    optimizer: ChunkOptimizer
    scheduler: LRScheduler | None = None
    scale: LossScale | None = None
    buddy: Buddy | None = None

    @property
    def lr(self) -> tuple[float, ...]:
        """The learning rate of each optimizer group."""
        return tuple(float(group["lr"]) for group in self.optimizer.torch.param_groups)

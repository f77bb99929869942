"""Steps that are under way at the same time, where the schedule has no flush."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from shoal.comm.lane import Ticket
from shoal.data import Batch
from shoal.pipeline import Work
from shoal.training.ballot import Answer
from shoal.training.loss import Sums
from shoal.training.stages import Training


@dataclass
class Step:
    """A step under way.

    - `version`: of the weights that it sees
    - `ran`, `after`: microbatches here, and on the replicas behind this one
    - `scale`: what its loss was multiplied by
    - `sums`: Totals.values, and behind them what they were divided by
    - `experts`: as of StepResult
    - `told`: when the sums are those of all ranks; `asked`: when `answer` is there; `agreed`: when `untouched` is, the
      parameters that no backward has reached, on any stage
    """

    batch: Batch
    version: int
    ran: int
    after: int
    scale: Tensor | None
    sums: Tensor
    experts: Sequence[Tensor] = ()
    told: Ticket | None = None
    asked: Ticket | None = None
    answer: Answer | None = None
    agreed: Ticket | None = None
    untouched: Sequence[str] = ()


Microbatch = tuple[Step, Training, int]
"""A step, its work, and which of its microbatches it is."""


class UnderWay(Work):
    """The `microbatches` of all steps under way, by number; `reduce`, `update`: what is done to the oldest step."""

    def __init__(
        self, microbatches: Mapping[int, Microbatch], reduce: Callable[[], None], update: Callable[[], None]
    ) -> None:
        self._microbatches, self._reduce, self._update = microbatches, reduce, update

    def around(self, microbatch: int) -> AbstractContextManager[None]:
        _, work, index = self._microbatches[microbatch]
        return work.around(index)

    def forward(self, microbatch: int) -> Sums:
        _, work, index = self._microbatches[microbatch]
        return work.forward(index)

    def take(self, microbatch: int, found: Sums) -> Tensor:
        _, work, index = self._microbatches[microbatch]
        return work.take(index, found)

    def backward(self, microbatch: int, complete: Collection[str] | None, last: bool) -> AbstractContextManager[None]:
        _, work, index = self._microbatches[microbatch]
        return work.backward(index, complete, last)

    def reduce(self, microbatch: int) -> None:
        self._reduce()

    def update(self, microbatch: int) -> None:
        self._update()

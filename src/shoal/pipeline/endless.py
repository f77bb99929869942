"""The actions of a stage in a schedule without a flush, generated step after step, with no end.

Each forward is followed by the oldest backward once all stages behind have a microbatch. When the last backward of a
step is done its gradients are reduced (R), provided those of the step before have been applied; its update (U) follows
some steps later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shoal.pipeline.actions import Action


@dataclass
class _Step:
    """A step under way.

    left: its microbatches whose backward is to come
    last: number of its last microbatch, -1 before the first
    reduced: R has been given
    """

    left: deque[int] = field(default_factory=deque)
    last: int = -1
    reduced: bool = False


class Endless:
    """Generates the actions of `stage`, numbering microbatches from 0.

    stage: the stage of this rank
    behind: number of stages after this one, and so of microbatches under way
    late: number of steps by which the update of a step comes after it
    """

    def __init__(self, stage: int, behind: int, late: int) -> None:
        self._stage, self._behind, self._late = stage, behind, late
        self._steps: deque[_Step] = deque()
        self._next = 0

    def step(self, microbatches: int) -> Iterator[Action]:
        """Yields the forwards of one more step, with the backwards that become due.

        The step's own gradients are reduced later (see `due`).
        """
        step = _Step()
        pending = [*self._steps, step]
        for number in range(self._next, self._next + microbatches):
            yield Action("F", self._stage, number)
            self._next, step.last = number + 1, number
            step.left.append(number)
            if sum(len(each.left) for each in pending) > self._behind:
                yield from self._back(pending)
        self._steps.append(step)

    def due(self) -> Iterator[Action]:
        """Yields the updates that are due after a step, with the actions that they need, then the next step's
        reduction."""
        while len(self._steps) > self._late:
            yield from self._update()
        if self._steps and not self._steps[0].left:
            yield from self._reduce(self._steps[0])

    def flush(self) -> Iterator[Action]:
        """Yields all outstanding updates, with the actions that they need."""
        while self._steps:
            yield from self._update()

    def _back(self, pending: Sequence[_Step]) -> Iterator[Action]:
        oldest = next(each for each in pending if each.left)
        yield Action("B", self._stage, oldest.left.popleft())
        if not oldest.left and self._steps and oldest is self._steps[0]:
            yield from self._reduce(oldest)

    def _reduce(self, step: _Step) -> Iterator[Action]:
        if not step.reduced:
            step.reduced = True
            yield Action("R", self._stage, step.last)

    def _update(self) -> Iterator[Action]:
        step = self._steps[0]
        while step.left:
            yield from self._back(self._steps)
        yield from self._reduce(step)
        self._steps.popleft()
        yield Action("U", self._stage, step.last)

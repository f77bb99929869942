"""A step, and an evaluation, through a pipeline: what a stage does with each microbatch (pipeline.Work).

Every stage loads every microbatch and runs the loss up to where its parts of the model end, so that masks, positions
and labels are where they are needed. The microbatches of a step are loaded at its beginning: the ranks of a pipeline
find out together what travels when shapes come that they have not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from shoal.comm import Group
from shoal.data import Batch
from shoal.module.attributes import attributes_put_back
from shoal.module.random import Drawn
from shoal.pipeline import Runner, Work
from shoal.training.forward import Forward
from shoal.training.loss import Sums
from shoal.training.microbatches import Run
from shoal.training.reduce import Reduce
from shoal.training.totals import Totals

Load = Callable[[Sequence[int]], Mapping[str, Tensor]]
Measure = Callable[[Mapping[str, Tensor], Sequence[int]], list[Sums]]
Add = Callable[[list[Sums], bool], None]


def kind_of(loaded: Mapping[str, Tensor], *more: Any) -> Any:
    """Gives what microbatches have in common for which the same travels from stage to stage."""
    return (*more, *((key, tuple(value.shape), value.dtype) for key, value in sorted(loaded.items())))


@dataclass(frozen=True)
class Staged:
    """Accumulate, where this rank has some stages of the model. `lockstep`: replicas whose ranks meet in their
    forwards."""

    forward: Forward
    totals: Totals
    reduce: Reduce
    pipeline: Runner
    lockstep: Group | None = None
    runs_once: ClassVar[bool] = True

    def run(self, batch: Batch, runs: Sequence[Run]) -> None:
        """Forward and backward of each microbatch, in the order of the schedule."""
        if runs:
            work, kinds = self.prepare(batch, runs)
            for _, counts in runs:
                self.totals.ran += counts
            self.pipeline.train(kinds, work)

    def prepare(self, batch: Batch, runs: Sequence[Run]) -> tuple[Training, list[Any]]:
        """Loads the microbatches, and finds out what travels of those kinds that are new; returns the work and the
        kinds."""
        work = Training(self, batch, runs)
        kinds = [kind_of(each, "train") for each in work.loaded]
        self.pipeline.learn(kinds, work.try_out, self.lockstep, work.trying)
        return work, kinds

    def evaluate(self, runs: Sequence[Run], load: Load, measure: Measure, add: Add) -> Iterator[int]:
        """Measures microbatches (see Evaluating), several of which are loaded at once; yields before each load how many
        are done."""
        at_once = 8 * self.pipeline.group.size
        for start in range(0, len(runs), at_once):
            yield start
            work = Evaluating(self.forward, runs[start : start + at_once], load, measure, add)
            kinds = [kind_of(each, "evaluate") for each in work.loaded]
            self.pipeline.learn(kinds, work.try_out, self.lockstep, work.trying)
            self.pipeline.evaluate(kinds, work)


class Training(Work):
    """The microbatches `runs` of one step (pipeline.Work)."""

    def __init__(self, staged: Staged, batch: Batch, runs: Sequence[Run]) -> None:
        self._forward, self._effects = staged.forward, staged.forward.effects
        self._totals, self._reduce = staged.totals, staged.reduce
        self._batch, self._runs = batch, runs
        with self._forward.ledger.span("compute", "load"):
            self.loaded = [batch.load(ids) for ids, _ in runs]
        self._drawn: dict[int, Drawn] = {}

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Wraps forwards of which nothing is left."""
        with self._effects.of(False), attributes_put_back(self._forward.module), self._forward.gather.aside():
            yield

    def try_out(self, index: int) -> Any:
        """Makes such a forward, of copies: a loss may write to what it is given."""
        sums = self._sums(index, _copies(self.loaded[index]))
        return sums.total, sums.count, sums.aux

    def around(self, microbatch: int) -> AbstractContextManager[None]:
        return self._effects.of(self._runs[microbatch][1])

    def forward(self, microbatch: int) -> Sums:
        try:
            return self._sums(microbatch, self.loaded[microbatch])
        finally:
            self._drawn[microbatch] = self._forward.randomness.drawn()
            self._forward.gather.left()

    def take(self, microbatch: int, found: Sums) -> Tensor:
        return self._totals.objective(found if self._runs[microbatch][1] else found.counting_nothing())

    def _sums(self, index: int, given: Mapping[str, Tensor]) -> Sums:
        loaded, ids = self._forward.place(given), self._runs[index][0]
        self._forward.randomness.begin(self._batch.step, ids)
        with self._forward.running(self._batch, index, len(self._runs), loaded):
            return self._forward.train(loaded)

    @contextmanager
    def backward(self, microbatch: int, complete: Collection[str] | None, last: bool) -> Iterator[None]:
        self._forward.randomness.replay(self._drawn[microbatch])
        with self._forward.keyed():
            if complete is None:
                yield
            else:
                with self._reduce.backward(last, complete):
                    yield


class Evaluating(Work):
    """The microbatches `runs` of an evaluation (pipeline.Work).

    `load(ids)` gives the samples of one, `measure(loaded, ids)` what is measured of it, and `add(found, counts)` takes
    that on the last stage.
    """

    def __init__(self, forward: Forward, runs: Sequence[Run], load: Load, measure: Measure, add: Add) -> None:
        self._forward, self._runs, self._measure, self._add = forward, runs, measure, add
        self.loaded = [load(ids) for ids, _ in runs]

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Wraps forwards of which nothing is left."""
        with attributes_put_back(self._forward.module), self._forward.gather.aside():
            yield

    def try_out(self, index: int) -> Any:
        return [(sums.total, sums.count) for sums in self._measured(index, _copies(self.loaded[index]))]

    def forward(self, microbatch: int) -> list[Sums]:
        try:
            return self._measured(microbatch, self.loaded[microbatch])
        finally:
            self._forward.gather.left()

    def take(self, microbatch: int, found: list[Sums]) -> None:
        self._add(found, self._runs[microbatch][1])

    def _measured(self, index: int, given: Mapping[str, Tensor]) -> list[Sums]:
        return self._measure(given, self._runs[index][0])


def _copies(loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in loaded.items()}

"""A step, and an evaluation, through a pipeline: what a stage does with each microbatch (pipeline.Work).

Every stage loads every microbatch and runs the loss up to where its parts of the model end, so that masks, positions and labels are where they are needed. The microbatches of a step are loaded
at its beginning: the ranks of a pipeline find out together what travels when shapes come that they have not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from shoal.comm import Group
from shoal.data import Batch
from shoal.module.random import Drawn, Randomness
from shoal.pipeline import Runner
from shoal.training.loss import Sums

Run = tuple[Sequence[int], bool]
"""A microbatch's samples, and whether it counts."""


Loaded = tuple[Mapping[str, Tensor], Sequence[int]]
"""A microbatch of an evaluation and its samples."""


class Steps(Protocol):
    """What is asked of a StepRunner."""

    def place(self, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def running(self, batch: Batch, index: int, number: int, microbatch: Mapping[str, Tensor]) -> Any: ...
    def counted(self, counts: bool) -> Any: ...
    def forward(self, microbatch: Mapping[str, Tensor]) -> Sums: ...
    def aside(self) -> Any: ...
    def left(self) -> None: ...
    def ran(self, counts: bool) -> None: ...
    def objective(self, sums: Sums) -> Tensor: ...
    def reducing(self, last: bool, complete: Collection[str] | None = None) -> Any: ...
    def keyed(self) -> Any: ...


def kind_of(loaded: Mapping[str, Tensor], *more: Any) -> Any:
    """What microbatches have in common for which the same travels from stage to stage."""
    return (*more, *((key, tuple(value.shape), value.dtype) for key, value in sorted(loaded.items())))


def train_in_stages(
    steps: Steps, pipeline: Runner, batch: Batch, runs: Sequence[Run], randomness: Randomness, alike: Group | None
) -> None:
    """Forward and backward of a rank's share of `batch`. `alike`: replicas whose ranks meet in their forwards, of which each has as many."""
    if runs:
        work = Training(steps, batch, runs, randomness)
        kinds = [kind_of(each, "train") for each in work.loaded]
        pipeline.learn(kinds, work.try_out, alike, work.trying)
        for _, counts in runs:
            steps.ran(counts)
        pipeline.train(kinds, work)


class Training:
    """The microbatches `runs` of one step (pipeline.Work)."""

    def __init__(self, steps: Steps, batch: Batch, runs: Sequence[Run], randomness: Randomness) -> None:
        self._steps, self._batch, self._runs, self._randomness = steps, batch, runs, randomness
        self.loaded = [batch.load(ids) for ids, _ in runs]
        self._drawn: dict[int, Drawn] = {}

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Around forwards of which nothing is left."""
        with self._steps.counted(False), self._steps.aside():
            yield

    def try_out(self, place: int) -> Any:
        """Such a forward."""
        sums = self._forward(place)
        return sums.total, sums.count, sums.aux

    def around(self, microbatch: int) -> Any:
        return self._steps.counted(self._runs[microbatch][1])

    def forward(self, microbatch: int) -> Tensor:
        try:
            sums = self._forward(microbatch)
        finally:
            self._drawn[microbatch] = self._randomness.drawn()
            self._steps.left()
        return self._steps.objective(sums if self._runs[microbatch][1] else sums.counting_nothing())

    def _forward(self, place: int) -> Sums:
        loaded, ids = self._steps.place(self.loaded[place]), self._runs[place][0]
        self._randomness.begin(self._batch.step, ids)
        with self._steps.running(self._batch, place, len(self._runs), loaded):
            return self._steps.forward(loaded)

    @contextmanager
    def backward(self, microbatch: int, complete: set[str] | None, last: bool) -> Iterator[None]:
        self._randomness.replay(self._drawn[microbatch])
        with self._steps.keyed():
            if complete is None:
                yield
            else:
                with self._steps.reducing(last, complete):
                    yield


def evaluate_in_stages(
    pipeline: Runner,
    loaded: Sequence[Loaded],
    counts: Sequence[bool],
    forward: Callable[[Mapping[str, Tensor], Sequence[int]], Sums],
    totals: Tensor,
    alike: Group | None,
    aside: Callable[[], AbstractContextManager[None]],
    left: Callable[[], None],
) -> None:
    """Adds to `totals`, on the last stage, what `forward` gives of those of the microbatches that count. `alike`: as above; `aside`, `left`: as of Steps."""
    if loaded:
        work = _Evaluation(loaded, counts, forward, totals, left)
        kinds = [kind_of(each, "evaluate") for each, _ in loaded]
        pipeline.learn(kinds, work.try_out, alike, aside)
        pipeline.evaluate(kinds, work)


class _Evaluation:
    def __init__(
        self,
        loaded: Sequence[Loaded],
        counts: Sequence[bool],
        forward: Callable[[Mapping[str, Tensor], Sequence[int]], Sums],
        totals: Tensor,
        left: Callable[[], None],
    ) -> None:
        self._loaded, self._counts, self._run, self._totals, self._left = loaded, counts, forward, totals, left

    def try_out(self, place: int) -> Any:
        sums = self._run(*self._loaded[place])
        return sums.total, sums.count

    def around(self, microbatch: int) -> Any:
        return nullcontext()

    def forward(self, microbatch: int) -> None:
        try:
            sums = self._run(*self._loaded[microbatch])
        finally:
            self._left()
        self._totals[0] += sums.total.double() * self._counts[microbatch]
        self._totals[1] += sums.count.double() * self._counts[microbatch]

    def backward(self, microbatch: int, complete: set[str] | None, last: bool) -> Any:
        raise AssertionError("an evaluation has no backward")

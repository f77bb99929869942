"""Accumulate, where this rank has the whole model: one microbatch after the other, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.data import Batch
from shoal.exchange.hooks import UserHooks
from shoal.training.forward import Forward
from shoal.training.loss import Sums
from shoal.training.microbatches import Run
from shoal.training.reduce import Reduce
from shoal.training.stages import Add, Load, Measure
from shoal.training.totals import Totals


class Local:
    """Runs a rank's share of a batch. `hooks`: those of users, which see each microbatch's own gradients."""

    runs_once = False
    """Whether the module can run once a microbatch only, whatever is measured of it."""

    def __init__(self, forward: Forward, totals: Totals, reduce: Reduce, hooks: UserHooks) -> None:
        self._forward, self._totals, self._reduce, self._hooks = forward, totals, reduce, hooks

    def run(self, batch: Batch, runs: Sequence[Run]) -> None:
        """Forward and backward of each microbatch, whether it counts or not."""
        forward = self._forward
        for index, (ids, counts) in enumerate(runs):
            with forward.ledger.span("compute", "load"):
                microbatch = forward.load(batch, ids)
            forward.randomness.begin(batch.step, ids)
            with forward.effects.of(counts), forward.running(batch, index, len(runs), microbatch):
                self.backward(forward.train(microbatch), index == len(runs) - 1, counts)

    def evaluate(self, runs: Sequence[Run], load: Load, measure: Measure, add: Add) -> Iterator[int]:
        """Measures microbatches (see Evaluating); yields before each how many are done."""
        for done, (ids, counts) in enumerate(runs):
            yield done
            add(measure(load(ids), ids), counts)

    def backward(self, sums: Sums, last: bool, counts: bool = True) -> None:
        """Backward of one microbatch; in the step's `last` one what is complete is exchanged while it goes on.

        One that does not count gives zeros.
        """
        self._forward.randomness.replay()
        self._totals.ran += counts
        objective = self._totals.objective(sums if counts else sums.counting_nothing())
        with self._hooks.seeing(self._totals.expected, sums.count, counts), self._reduce.backward(last):
            objective.backward()

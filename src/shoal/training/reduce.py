"""Reduce: gradients go out while the last backward runs, and have come back when it is over."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from shoal.chunks import sum_of_squares
from shoal.device import record_use
from shoal.errors import UserError
from shoal.exchange.aside import Aside
from shoal.exchange.reducer import Reducer
from shoal.exchange.rounds import Round
from shoal.pipeline import Runner as Pipeline
from shoal.training.forward import Forward
from shoal.training.setup import Trained
from shoal.training.totals import Totals


@dataclass(frozen=True)
class Reduced:
    """What the exchange has left on this rank.

    `squares`: exact sums of squares of this rank's part of the gradients. `touched`: whether a backward here has
    reached each parameter.
    """

    squares: Tensor
    touched: Mapping[str, bool]


class Reduce:
    """Exchanges the gradients of each step. `pipeline`: runs the stages of this rank, where it has not the whole
    model."""

    def __init__(self, forward: Forward, trained: Trained, totals: Totals, pipeline: Pipeline | None = None) -> None:
        self._forward, self._trained, self._totals, self._pipeline = forward, trained, totals, pipeline
        self._reducer = Reducer(trained.parameters, trained.algorithm, trained.hooks)
        self._frozen = {name: each for name, each in trained.parameters.items() if not each.requires_grad}

    def follow(self) -> None:
        """Goes on with the chunks that the algorithm has now."""
        self._reducer.detach()
        self._reducer = Reducer(self._trained.parameters, self._trained.algorithm, self._trained.hooks)

    @property
    def arrivals(self) -> list[str]:
        """The parameters in the order in which the last step's backward completed their gradients on this rank."""
        return self._reducer.arrivals

    @property
    def rows(self) -> Mapping[str, Tensor | None]:
        """The rows of each sparse gradient that are not zero, None for all."""
        return self._reducer.rows

    def every_row(self) -> None:
        """Counts sparse gradients as whole up to the next step, since something was added to all their rows."""
        self._reducer.rows = dict.fromkeys(self._reducer.rows)

    @property
    def rounds(self) -> Sequence[Round]:
        """The rounds of the last step in which chunks were exchanged."""
        return self._reducer.rounds

    def begin(self, step: int, most: int, alike: bool) -> None:
        """Begins a step in which a partner has at most `most` microbatches; `alike`: each runs so many.

        Raises UserError for a parameter that was frozen when the engine was made, and is not any more.
        """
        if (name := next((name for name, each in self._frozen.items() if each.requires_grad), None)) is not None:
            raise UserError(
                f"{name} has requires_grad now, and was frozen when the engine was made, which has neither memory for "
                "its gradient nor an optimizer's state: make the engine with it trainable, and call "
                "requires_grad_(False) on engine.module until it is to learn"
            )
        self._reducer.begin(step, self._backwards(most, alike), self._totals.unscale)

    def _backwards(self, most: int, alike: bool) -> Sequence[int | None]:
        """Gives the stages of the backwards of a step, None where partners may make them in another order."""
        if self._pipeline is None:
            return (None,) * most
        return self._pipeline.backwards(most) if alike else (None,) * (most * len(self._pipeline.own))

    @contextmanager
    def backward(self, last: bool, complete: Collection[str] | None = None) -> Iterator[None]:
        """Wraps a backward: what is complete is exchanged while it goes on (see Reducer.backward)."""
        own_mean = self._totals.own_mean()  # in the last microbatch that of the whole step
        self._trained.optimizer.settle()  # gradients are about to change
        self._forward.gather.backward_begins()
        with self._forward.ledger.span("compute", "backward"), self._reducer.backward(own_mean, last, complete):
            yield
        self._forward.gather.backward_is_over()

    def finish(self) -> Reduced:
        """Hands over what is left, and waits until all has come."""
        self._reducer.finish()
        found = self._reducer.norms
        record_use(found)  # it may be given up on another stream
        return Reduced(sum_of_squares(found, self._forward.randomness.device), self._reducer.touched)


class ReduceAside(Reduce):
    """Sums the gradients of a step aside, while those of the step before are exchanged and applied; then hands them
    over at once."""

    def __init__(self, forward: Forward, trained: Trained, totals: Totals) -> None:
        super().__init__(forward, trained, totals)
        self._reducer.detach()
        self._aside = Aside(trained.parameters, trained.algorithm.replica.chunks)

    @contextmanager
    def backward(self, last: bool, complete: Collection[str] | None = None) -> Iterator[None]:
        """Wraps a backward, whose gradients are added up aside."""
        with self._forward.ledger.span("compute", "backward"):
            yield

    def hand_over(self, step: int, unscale: Tensor | None) -> None:
        """Exchanges the gradients of `step` from here on, beside the computation. `unscale`: as of Reducer.begin."""
        self._reducer.begin(step, unscale=unscale)
        self._reducer.hand_over(self._aside.flats, self._aside.touched)
        self._aside.clear()

"""Reduce: gradients go out while the last backward runs, and have come back when it is over."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from shoal.chunks import sum_of_squares
from shoal.device import record_use
from shoal.errors import UserError
from shoal.exchange.aside import Aside
from shoal.exchange.reducer import Reducer
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
    """Exchanges the gradients of each step. `rounds`: backwards of each microbatch on this rank, one for each of its
    stages."""

    def __init__(self, forward: Forward, trained: Trained, totals: Totals, rounds: int = 1) -> None:
        self._forward, self._trained, self._totals, self._rounds = forward, trained, totals, rounds
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

    def begin(self, step: int, most: int) -> None:
        """Begins a step in which a rank has at most `most` microbatches. Raises UserError for a parameter that was
        frozen when the engine was made, and is not any more."""
        if (name := next((name for name, each in self._frozen.items() if each.requires_grad), None)) is not None:
            raise UserError(
                f"{name} has requires_grad now, and was frozen when the engine was made, which has neither memory for "
                "its gradient nor an optimizer's state: make the engine with it trainable, and call "
                "requires_grad_(False) on engine.module until it is to learn"
            )
        self._reducer.begin(step, most * self._rounds, self._totals.unscale)

    @contextmanager
    def backward(self, last: bool, complete: Collection[str] | None = None) -> Iterator[None]:
        """Wraps a backward: what is complete is exchanged while it goes on (see Reducer.backward)."""
        own_mean = self._totals.own_mean()  # in the last microbatch that of the whole step
        self._trained.optimizer.settle()  # gradients are about to change
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
        self._reducer.begin(step, 1, unscale)
        self._reducer.hand_over(self._aside.flats, self._aside.touched)
        self._aside.clear()

"""Delayed gradients: a step's sum travels while the next steps compute, and is applied `delay` steps later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.device import record_use
from shoal.errors import UserError
from shoal.exchange.algorithm import Algorithm, Holds, Replica, State, by_parameter
from shoal.exchange.sends import Sends

TOUCHED, UNTOUCHED = 1.0, 2.0
"""What a checkpoint says of a parameter's part in gradients that wait; 0 where nothing is known."""


@dataclass
class Delayed(Algorithm):
    """Applies in step s the mean gradient of step s - `delay`; the first `delay` steps update nothing, also those after
    another exchange.

    Takes a buffer of gradients for each step of delay.
    """

    delay: int = 1
    _first: int | None = field(init=False, default=None, repr=False, compare=False)
    """The step of the first gradients; None before a step."""
    _untouched: list[Sequence[str] | None] = field(init=False, default_factory=list, repr=False, compare=False)
    """Of the gradients that wait, which parameters they have not touched; None where that is not known."""

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        return Sends(beside=True)

    def __post_init__(self) -> None:
        if self.delay < 1:
            raise UserError(f"plan.exchange: delay = {self.delay}: give at least 1 step")

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._group = replica.background("delayed")
        self._waiting = [[chunk.like_gradient() for chunk in replica.chunks] for _ in range(self.delay)]
        names = [slot.name for chunk in replica.chunks for slot in chunk.slots]
        self._noted = [{name: torch.zeros(1) for name in names} for _ in range(self.delay)]
        self.restored()

    def begin(self, step: int) -> None:
        """Finds out, before the first step here, whether a checkpoint has brought gradients that wait."""
        if self._first is None:
            there = any(bool(flat.any()) for flats in self._waiting for flat in flats)
            self._first = 0 if there else step

    def holds(self, step: int) -> Holds:
        return Holds.LATE if step >= (self._first or 0) + self.delay else Holds.NOTHING

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        """Does nothing: gradients travel after backward, while the next steps compute."""

    @torch.no_grad()
    def exchanged(self, step: int, to_mean: Tensor) -> None:
        """Stores this step's gradients where those due now waited, and puts those into the chunks."""
        for chunk, waiting in zip(self.replica.chunks, self._waiting[step % self.delay], strict=True):
            due = waiting.clone()
            torch.mul(chunk.gradient, to_mean.to(waiting.dtype), out=waiting)
            chunk.gradient.copy_(due)
            self.replica.lane.submit(partial(self._sum, waiting, chunk.index), f"gradients {chunk.index}")

    def due(self, step: int, untouched: Sequence[str]) -> Sequence[str]:
        index = step % self.delay
        due, self._untouched[index] = self._untouched[index], untouched
        return untouched if due is None else due

    def begin_anew(self) -> None:
        self._untouched = [None] * self.delay
        super().begin_anew()
        self._first = None

    def restored(self) -> None:
        # not known of older checkpoints: taken as in the step in which they are applied
        self._untouched = [
            [name for name, said in noted.items() if said > TOUCHED] if any(map(bool, noted.values())) else None
            for noted in self._noted
        ]

    def _sum(self, flat: Tensor, index: int) -> None:
        record_use(flat)  # it may be given up meanwhile
        self._group.all_reduce(flat, purpose=f"gradients {index}")

    def settle(self) -> None:
        self.replica.lane.wait()

    def state(self) -> dict[str, State]:
        found = dict[str, State]()
        for number, (flats, noted, untouched) in enumerate(
            zip(self._waiting, self._noted, self._untouched, strict=True)
        ):
            for name, said in noted.items():
                said.fill_(0.0 if untouched is None else UNTOUCHED if name in untouched else TOUCHED)
            found[f"waiting{number}"] = State(by_parameter(self.replica.chunks, flats), "mean")
            found[f"untouched{number}"] = State(noted, "mean")
        return found

"""The actions of a rank of a pipeline, and schedules: their order on each rank.

    F   forward of a stage on a microbatch            needs F of the stage before
    B   its backward                                  needs its F, and B (or I) of the stage behind
    I   the half of B that computes the input's gradient, for which the stage before waits
    W   the other half, the weights' gradients, for which no other rank waits
    U   the update of a stage's weights by the gradients so far, in schedules without a flush
    R   the exchange of those gradients, where it overlaps other actions; in no schedule, for it runs as soon
        as they are there

A model is cut into `ranks * chunks` stages, which are assigned to the ranks in turn ("loop": rank 0, 1, .., 0, 1, ..)
or there and back ("v": 0, 1, .., 1, 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

from shoal.errors import UserError

Kind = Literal["F", "B", "I", "W", "R", "U"]
Waits = tuple[tuple[int, bool], ...]
"""The actions that one needs: the place of each among those of all ranks, one rank after the other, and whether it runs
on another rank."""
GIVES_GRADIENTS = ("B", "W")
"""The actions that compute gradients of weights: each stage has one a microbatch."""


@dataclass(frozen=True)
class Action:
    """An action of a stage on a microbatch; for U the last microbatch whose gradient the update takes."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}:{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks of a pipeline.

    ranks, chunks: the stages are ranks * chunks
    microbatches: their number
    orders: `orders[rank]` are the actions of a rank, in order
    placement: the assignment of stages to ranks, see above
    flushes: all of it is one step, after which weights are updated; else updates are among the actions
    """

    name: str
    ranks: int
    chunks: int
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]
    placement: Literal["loop", "v"] = "loop"
    flushes: bool = True

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Returns the rank that has `stage`."""
        turn, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.placement == "v" and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages of a rank, in ascending order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def backwards(self, rank: int) -> list[int]:
        """Returns the stage of each backward of a rank, or of the half that computes gradients of weights, in order."""
        return [action.stage for action in self.orders[rank] if action.kind in GIVES_GRADIENTS]

    def of_first(self, microbatches: int) -> Schedule:
        """Returns this order with only the first `microbatches`, for a shorter step. Raises UserError if there are
        fewer."""
        if microbatches > self.microbatches:
            raise UserError(
                f"schedule {self.name} is of {self.microbatches} microbatches, and this step has {microbatches} on a "
                "rank"
            )
        orders = as_orders([[action for action in order if action.microbatch < microbatches] for order in self.orders])
        return replace(self, microbatches=microbatches, orders=orders)

    def forwards(self, microbatches: int) -> Schedule:
        """Returns a schedule of forwards only, the stages of a rank one after the other."""
        orders = [
            [Action("F", stage, each) for stage in self.stages_of(rank) for each in range(microbatches)]
            for rank in range(self.ranks)
        ]
        return replace(self, microbatches=microbatches, orders=as_orders(orders))

    def needs(self, action: Action) -> list[Action]:
        """Returns the actions that must be done before `action`, on any rank.

        For a backward they are those in the schedule: B, or I where it is split.
        """
        stage, microbatch = action.stage, action.microbatch
        forward = Action("F", stage, microbatch)
        match action.kind:
            case "F":
                return [Action("F", stage - 1, microbatch)] if stage else []
            case "B" | "I":
                last = stage == self.stages - 1
                return [forward] if last else [forward, self.backward_of(stage + 1, microbatch)]
            case "W":
                return [Action("I", stage, microbatch)]
            case "R" | "U":
                return [Action("B", stage, microbatch)]

    def backward_of(self, stage: int, microbatch: int) -> Action:
        """Returns the action that computes the gradient of a stage's input."""
        half = Action("I", stage, microbatch)
        return half if half in self._actions[self.rank_of(stage)] else Action("B", stage, microbatch)

    @cached_property
    def waits(self) -> tuple[tuple[Waits, ...], ...]:
        """What each action of each rank needs. Found once, since a schedule is timed with many costs."""
        number = {action: at for at, action in enumerate(chain.from_iterable(self.orders))}
        return tuple(
            tuple(
                tuple((number[need], self.rank_of(need.stage) != rank) for need in self.needs(action))
                for action in order
            )
            for rank, order in enumerate(self.orders)
        )

    @cached_property
    def _actions(self) -> list[frozenset[Action]]:
        return [frozenset(order) for order in self.orders]


def as_orders(orders: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Returns the orders as tuples."""
    return tuple(tuple(order) for order in orders)

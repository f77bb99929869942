"""Computes the duration of a schedule: a rank runs one action after the other, each as soon as its needs have
arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.pipeline.actions import Action, Kind, Schedule, Waits


@dataclass(frozen=True)
class Costs:
    """Costs in seconds.

    seconds: of each (kind of action, stage); 0 if missing
    message: of a transfer from rank to rank
    """

    seconds: Mapping[tuple[Kind, int], float]
    message: float = 0.0

    @classmethod
    def even(
        cls, stages: int, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0, message: float = 0.0
    ) -> Costs:
        """Returns equal costs for all stages: of a forward, and of the halves of a backward; a whole backward takes
        both."""
        kinds: dict[Kind, float] = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}
        return cls({(kind, stage): seconds for kind, seconds in kinds.items() for stage in range(stages)}, message)

    def of(self, action: Action) -> float:
        return self.seconds.get((action.kind, action.stage), 0.0)


@dataclass(frozen=True)
class Simulated:
    """The timeline of a schedule.

    spans: for each rank (action, start, stop) in order
    seconds: from the first start to the last stop
    bubble: the fraction of all ranks' time in which they wait
    """

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    seconds: float
    bubble: float


def simulate(schedule: Schedule, costs: Costs) -> Simulated:
    """Returns the timeline of a schedule that `check` has passed."""
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule.orders]
    firsts = [0, *accumulate(map(len, schedule.orders))]
    left, free = firsts[-1], [0.0] * schedule.ranks
    ends: list[float | None] = [None] * left
    while left:
        for rank, (order, waits, own) in enumerate(zip(schedule.orders, schedule.waits, spans, strict=True)):
            while len(own) < len(order):
                start = _start(free[rank], waits[len(own)], ends, costs.message)
                if start is None:
                    break
                action = order[len(own)]
                ends[firsts[rank] + len(own)] = free[rank] = start + costs.of(action)
                own.append((action, start, free[rank]))
                left -= 1
    seconds = max(free, default=0.0)
    busy = sum(stop - start for rank in spans for _, start, stop in rank)
    bubble = 1 - busy / (schedule.ranks * seconds) if seconds else 0.0
    return Simulated(tuple(tuple(rank) for rank in spans), seconds, bubble)


def _start(free: float, waits: Waits, ends: Sequence[float | None], message: float) -> float | None:
    """When an action starts on a rank that is `free` from then on; None where something that it needs has no end
    yet."""
    for need, is_apart in waits:
        end = ends[need]
        if end is None:
            return None
        arrived = end + message if is_apart else end
        free = arrived if arrived > free else free
    return free

"""Computes the duration of a schedule: a rank runs one action after the other, each as soon as its needs have
arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.pipeline.actions import Action, Kind, Schedule


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
    ends: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule.orders]
    places, free = [0] * schedule.ranks, [0.0] * schedule.ranks
    left = sum(map(len, schedule.orders))
    while left:
        for rank, order in enumerate(schedule.orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                needs = schedule.needs(action)
                if any(need not in ends for need in needs):
                    break
                arrived = [
                    ends[need] + (costs.message if schedule.rank_of(need.stage) != rank else 0.0) for need in needs
                ]
                start = max([free[rank], *arrived])
                ends[action] = free[rank] = start + costs.of(action)
                spans[rank].append((action, start, free[rank]))
                places[rank] += 1
                left -= 1
    seconds = max(ends.values(), default=0.0)
    busy = sum(stop - start for rank in spans for _, start, stop in rank)
    bubble = 1 - busy / (schedule.ranks * seconds) if seconds else 0.0
    return Simulated(tuple(tuple(rank) for rank in spans), seconds, bubble)

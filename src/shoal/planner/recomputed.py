"""Which blocks of a choice are computed again: as many as memory asks for, in the least time (see knapsack); and more,
where weights have their home on the host, that these may stay on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

from shoal.plan import option_name, option_parameters
from shoal.planner.knapsack import Counts
from shoal.planner.lanes import Lane
from shoal.planner.policies import by_place
from shoal.planner.task import Choice
from shoal.planner.timed import Timed

FREER = 16
"""Ways at most to compute again more than must be that are tried."""
LAST = 4
"""Choices whose counts are kept."""


class Recomputed(Timed):
    """How the stages of a task's choices treat their blocks."""

    def most(self, choice: Choice) -> float:
        """Bytes that a rank may use of its device: with a budget of `plan.memory` those."""
        said = None if choice.offload is None or self.prices.slowest.on_host else choice.offload.device
        return self.task.most if said is None else min(self.task.most, said)

    def counts(self, choice: Choice) -> list[Counts]:
        """How each stage treats its blocks: all as `choice` says where it names a way other than "none"; where nothing
        fits, what frees most."""
        return list(self._counts_of(choice))

    @cached_property
    def _counts_of(self) -> Callable[[Choice], list[Counts]]:
        """Keeps those of the last choices: seconds are asked for first, and then what the choice holds."""
        return lru_cache(maxsize=LAST)(self._find)

    def _find(self, choice: Choice) -> list[Counts]:
        lane = self.lane(choice)
        counts = lane.none()
        if choice.recompute != "none" and choice.recompute in lane.policies:
            return lane.all_by(str(choice.recompute))
        if (pinned := self._pinned(lane)) is not None:
            return pinned
        number = self.deal(choice, lane, counts).most
        return self._freed(choice, lane, number, dict(self._needs(choice, lane, number)))

    def _freed(self, choice: Choice, lane: Lane, number: int, needs: Mapping[int, float]) -> list[Counts]:
        """The counts of all stages where these ranks free so many bytes in the least time."""
        counts = lane.none()
        for rank, need in needs.items():
            found = self._cheapest(choice, lane, rank, self._flying(choice, rank, number), need)
            for place, own in zip(lane.cuts.ranks[rank], lane.split(rank, found), strict=True):
                counts[place] = own
        return counts

    def more(self, choice: Choice, lane: Lane, number: int, counts: list[Counts]) -> Iterator[list[Counts]]:
        """Counts with which stages free more than with `counts`, which free what must be of `number` microbatches, by
        more and more. Nothing where a pin, or the choice, says what is computed again, or nothing moves."""
        if not self._may_be_more(choice, lane):
            return
        fronts = [lane.front(rank, self._flying(choice, rank, number), False).frees for rank in range(lane.ranks)]
        steps, must = min(FREER, max(map(len, fronts)) - 1), dict(self._needs(choice, lane, number))
        for step in range(1, steps + 1):
            frees = [own[math.ceil(step * (len(own) - 1) / steps)] for own in fronts]
            needs = {rank: max(must.get(rank, 0.0), each) for rank, each in enumerate(frees)}
            before, counts = counts, self._freed(choice, lane, number, needs)
            if counts != before:
                yield counts

    def all_that_may(self, choice: Choice, lane: Lane, number: int) -> list[Counts] | None:
        """The last of `more`, None for nothing."""
        if not self._may_be_more(choice, lane):
            return None
        return self._freed(choice, lane, number, dict.fromkeys(range(lane.ranks), math.inf))

    def _may_be_more(self, choice: Choice, lane: Lane) -> bool:
        free = choice.recompute == "none" and "recompute" not in self.task.pins and len(lane.policies) > 1
        moves = choice.offload is not None and choice.offload.device is not None and choice.on_device > 0
        return free and moves

    def _needs(self, choice: Choice, lane: Lane, number: int) -> Iterator[tuple[int, float]]:
        """Yields the ranks of a pipeline that have to free something, and how many bytes."""
        plain, stays = self._plain(choice, lane, number), choice.on_device
        for ranks in lane.cuts.alike if stays else ():
            room = self.most(choice) - self._stands(choice, lane, ranks[0]).bytes
            for rank in ranks:
                if stays * plain[rank] > room:
                    yield rank, plain[rank] - room / stays

    def _cheapest(self, choice: Choice, lane: Lane, rank: int, flying: tuple[int, ...], need: float) -> Counts:
        """The counts of a rank's blocks that free `need` bytes in the least time; where none do, those that free
        most."""
        whole = self._own(choice.spread, lane.cuts, rank).again * choice.microbatch
        best = None
        fronts = [(lane.front(rank, flying, True), need)] if "none" in lane.policies else []
        for front, wanted in (*fronts, (lane.front(rank, flying, False), need + whole)):
            found = front.cheapest(wanted)
            if found is not None and (best is None or found[0] < best[0]):
                best = found[0], front, found[1]
        if best is None:
            front = lane.front(rank, flying, False)
            return front.at(len(front.frees) - 1)
        return best[1].at(best[2])

    def _pinned(self, lane: Lane) -> list[Counts] | None:
        """The counts where the plan's `recompute` is given."""
        given = self.task.pins.get("recompute")
        if len(lane.policies) == 1:
            return lane.none()
        if given is None:
            return None
        ways = self._ways(lane, option_name(given, "recompute"), option_parameters(given))
        return [
            tuple(
                tuple(sum(ways.get(each, "none") == policy for each in numbers) for policy in lane.policies)
                for _, numbers in blocks
            )
            for blocks in lane.cuts.blocks
        ]

    def _ways(self, lane: Lane, name: str, parameters: Mapping[str, Any]) -> dict[int, str]:
        """How blocks are treated, by their numbers, where not all of them are alike."""
        if name == "budget":
            return dict.fromkeys(lane.over_budget(parameters["keep"]), "full")
        number = sum(len(numbers) for blocks in lane.cuts.blocks for _, numbers in blocks)
        return by_place(parameters, number)

"""What the stages of a choice take and keep, apart from what copies of the model share: found once for all choices that
differ in that alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from shoal.planner.costs import Prices, Sizes, together
from shoal.planner.degrees import Spread
from shoal.planner.held import standing, tied_elements
from shoal.planner.knapsack import Counts
from shoal.planner.lanes import Cuts, Lane, cut_for, fill_of, policies_of, seconds_of
from shoal.planner.pipes import Pace, parted, slowest, under_way, waiting
from shoal.planner.replicas import Dealt, Replicas, dealt, replicas_of
from shoal.planner.task import Choice, Offload, Task


class Timed:
    """The stages of a task's choices."""

    def __init__(self, task: Task) -> None:
        self.task, self.prices, self.policies = task, Prices(task), policies_of(task)
        self.by_compile = self.prices, Prices(task, compiled=True)  # blocks as they are written, and compiled
        self._lane, self._cuts = cache(self._new_lane), cache(self._new_cuts)
        self.replicas = cache(self._new_replicas)
        self._own, self._plain = cache(self._new_own), cache(self._new_plain)
        self._standing, self._timed = cache(self._new_standing), cache(self._new_timed)

    def _new_cuts(self, spread: Spread, stages: int) -> Cuts:
        return cut_for(self.prices, spread, stages)

    def _new_lane(self, spread: Spread, rows: int, chunks: int, compiled: bool, policies: tuple[str, ...]) -> Lane:
        return Lane(self.by_compile[compiled], self._cuts(spread, spread.stages * chunks), spread, rows, policies)

    def _new_replicas(self, spread: Spread) -> Replicas:
        return replicas_of(self.prices, spread)

    def lane(self, choice: Choice) -> Lane:
        """The stages of a choice."""
        policies = policies_of(self.task, choice.compile and choice.recompute == "none")
        return self._lane(choice.spread, choice.microbatch, choice.chunks, choice.compile, policies)

    def _new_own(self, spread: Spread, stages: int, rank: int) -> Sizes:
        own = self._cuts(spread, stages).sizes[rank :: spread.stages]
        if len(own) == 1:
            return own[0]
        return replace(together([(each, 1) for each in own]), waiting=max(each.trained for each in own[:-1]))

    def least(self, choice: Choice) -> float:
        """Seconds that no estimate with the stages and microbatches of `choice` is below."""
        lane = self.lane(choice)
        found = self._in_lane(choice, lane, lane.none(), together=False)
        return math.fsum(found[0].values())

    def _flying(self, choice: Choice, rank: int, number: int) -> tuple[int, ...]:
        ranks = choice.spread.stages
        return under_way(choice.schedule, ranks, number, choice.chunks)[rank] if ranks > 1 else (1,)

    def _stands(self, choice: Choice, rank: int) -> dict[str, float]:
        apart = choice.zero, choice.shard, choice.offload is not None
        return self._standing(choice.spread, choice.microbatch, choice.chunks, *apart, rank)

    def _new_standing(
        self, spread: Spread, rows: int, chunks: int, zero: int, shard: int | None, offloads: bool, rank: int
    ) -> dict[str, float]:
        away = Offload() if offloads else None
        choice = Choice(spread, rows, zero=zero, shard=shard, chunks=chunks, offload=away)
        own = self._own(spread, spread.stages * chunks, rank)
        if self._meets(choice) or spread.copies == 1:  # a backward lends to chunks of its stage alone
            own = replace(own, waiting=0.0)
        return standing(self.prices, choice, own, rank == spread.stages - 1, tied_elements(self.prices, spread))

    def _new_plain(self, spread: Spread, rows: int, schedule: str, chunks: int, number: int) -> tuple[float, ...]:
        """Bytes of the activations of each rank of a pipeline where nothing is computed again."""
        choice = Choice(spread, rows, schedule=schedule, chunks=chunks)
        sizes, ranks = self._cuts(spread, spread.stages * chunks).sizes, spread.stages
        return tuple(
            rows * sum(number * size.saved["none"] for number, size in zip(flying, sizes[rank::ranks], strict=True))
            for rank in range(ranks)
            for flying in [self._flying(choice, rank, number)]
        )

    def _kept(
        self, choice: Choice, lane: Lane, rank: int, flying: Sequence[int], counts: Sequence[Counts]
    ) -> tuple[float, float]:
        """Bytes of the activations of a rank: those that wait for a backward, and those of the block that is computed
        again."""
        kept, again = lane.kept(rank, flying, counts)
        whole = self._own(choice.spread, len(lane.works), rank).largest if again else 0.0
        return choice.microbatch * kept, choice.microbatch * whole

    def _meets(self, choice: Choice) -> bool:
        """Whether replicas run as many microbatches, since they meet in their forwards."""
        return choice.zero == 3 or choice.offload is not None or choice.spread.experts > 1

    def deal(self, choice: Choice, lane: Lane, counts: list[Counts], together: bool | None = None) -> Dealt:
        """How many microbatches each replica has."""
        return self._in_lane(choice, lane, counts, self._meets(choice) if together is None else together)[1]

    def _dealt(
        self, choice: Choice, lane: Lane, counts: Sequence[Counts], together: bool
    ) -> tuple[Dealt, list[Pace], dict[int, tuple[float, dict[str, float]]]]:
        """The deal; the seconds of all stages on the replica that takes longest; what stages compute again."""
        again = {place: lane.again(place, own) for place, own in enumerate(counts)} if self._recomputes(counts) else {}
        replicas: Replicas = self.replicas(choice.spread)
        number = math.ceil(self.task.rows / choice.microbatch)
        halves = parted(choice.schedule, lane.ranks, math.ceil(number / len(replicas.kinds)), choice.chunks)
        timed = [seconds_of(lane, speeds, again, halves) for speeds in replicas.speeds]
        paces = [(slowest(stages, lane.ranks)[1], fill_of(choice, lane, stages)) for stages in timed]
        pinned = tuple(self.task.pins.get("shares", ()))
        if "shares" in self.task.pins and not pinned and len(paces) > 1:
            pinned = (1,) * choice.spread.copies
        found = dealt(number, paces, replicas, pinned, together)
        return found, timed[found.slowest], again

    def _recomputes(self, counts: Sequence[Counts]) -> bool:
        first = 1 if self.policies[0] == "none" else 0
        return any(any(each[first:]) for own in counts for each in own)

    def _in_lane(
        self, choice: Choice, lane: Lane, counts: list[Counts], together: bool
    ) -> tuple[dict[str, float], Dealt, tuple[Pace, ...], int]:
        """The terms that do not depend on what copies of the model share; the deal; seconds of all stages, and the rank
        of the pipeline that others wait for. Found once for all that differ in where their state lies."""
        return self._timed(lane, *timing(choice), tuple(counts), together)

    def _new_timed(
        self,
        lane: Lane,
        spread: Spread,
        rows: int,
        schedule: str,
        chunks: int,
        counts: tuple[Counts, ...],
        together: bool,
    ) -> tuple[dict[str, float], Dealt, tuple[Pace, ...], int]:
        choice = Choice(spread, rows, schedule=schedule, chunks=chunks)
        deal, stages, again = self._dealt(choice, lane, counts, together)
        number, ranks = deal.number, lane.ranks
        slow, busy = slowest(stages, ranks)
        busy *= number
        sent: dict[str, float] = {}
        for place in range(slow, len(stages), ranks):
            repeated = again[place][1] if again else {}
            for sends, times in ((lane.works[place].sent, number), (repeated, number * (1 + stages[place].parted))):
                for what, seconds in sends.items():
                    sent[what] = sent.get(what, 0.0) + times * seconds
        terms = {"compute": busy - math.fsum(sent.values()), **sent}
        if ranks > 1:
            terms["bubble"] = waiting(fill_of(choice, lane, stages), busy, ranks, self.prices.slowest.crowd)
            hops = (ranks - 1) * choice.chunks + number * choice.chunks * (1 - self.task.cluster.overlap)
            terms["stages"] = 2 * hops * self.message(choice)
        terms["data"] = number * choice.microbatch * self.task.cluster.data
        terms["other"] = self.task.cluster.step
        return terms, deal, tuple(stages), slow

    def message(self, choice: Choice) -> float:
        """Seconds of what travels between two stages, the longest way."""
        spread = choice.spread
        if spread.stages == 1:
            return 0.0
        sizes = self._cuts(spread, spread.stages * choice.chunks).sizes
        link = self.task.cluster.link(spread.stride("stages"), spread.stages, "send")
        return link.seconds("send", max(each.boundary for each in sizes[1:]) * choice.microbatch, 2)


def timing(choice: Choice) -> tuple[Spread, int, str, int]:
    """What decides which microbatches are under way."""
    return choice.spread, choice.microbatch, choice.schedule, choice.chunks

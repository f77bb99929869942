"""What the stages of a choice take and keep, apart from what copies of the model share: found once for all choices that
differ in that alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shoal.planner.costs import Prices
from shoal.planner.cuts import Cuts, alone, cut_at, fastest
from shoal.planner.degrees import Spread
from shoal.planner.exchanges import agreed
from shoal.planner.held import Tied, standing, tied_elements
from shoal.planner.knapsack import Counts
from shoal.planner.lanes import Lane, at_least, fill_of, seconds_of
from shoal.planner.once import once
from shoal.planner.pipes import (
    HALVED,
    THERE_AND_BACK,
    Crowd,
    Pace,
    of_ranks,
    parted,
    placed,
    shared,
    slowest,
    under_way,
    waits,
)
from shoal.planner.policies import keeps_operations, policies_of
from shoal.planner.replicas import Dealt, Replicas, count_alike, dealt, replicas_of
from shoal.planner.sizes import Sizes, together
from shoal.planner.task import EXACT, Choice, Offload, Task
from shoal.planner.temporaries import Lives


class Standing(NamedTuple):
    """Bytes that stand on the device of a rank, whatever is under way: by role, and in all."""

    by_role: dict[str, float]
    bytes: float


APART = ("data", "other")
"""Terms that do not depend on what is computed again."""


class Timed:
    """The stages of a task's choices. `known`: those of a task that differs from this one in what ranks may use, in the
    bandwidth of links and to the host alone: what stages take and keep that send over the same links is taken from
    there."""

    def __init__(self, task: Task, known: Timed | None = None) -> None:
        self.task, self.known = task, known
        self._policies = policies_of(task), policies_of(task, selective=False)
        of: Sequence[Prices | None] = (None, None) if known is None else known.by_compile
        self.prices: Prices = Prices(task, known=of[0])
        self.by_compile: tuple[Prices, Prices] = self.prices, Prices(task, True, of[1])  # as written, and compiled
        self.is_known = self.prices.is_known

    def cuts(self, choice: Choice) -> Cuts:
        """The stages of a choice: those that it says, or the ones of which the slowest takes least."""
        back = choice.schedule in THERE_AND_BACK
        if choice.stages:
            return self._cuts(choice.spread, choice.stages, back)
        return self._fastest(choice.spread, choice.chunks, back, choice.microbatch, choice.compile)

    @once
    def _cuts(self, spread: Spread, numbers: tuple[int, ...], back: bool) -> Cuts:
        return cut_at(self.prices, spread, numbers, placed(spread.stages, len(numbers), back))

    @once
    def _fastest(self, spread: Spread, chunks: int, back: bool, rows: int, compiled: bool) -> Cuts:
        places = placed(spread.stages, spread.stages * chunks, back)
        return self._cuts(spread, fastest(self.by_compile[compiled], spread, places, self.mean(spread, rows)), back)

    @once
    def _lane(self, spread: Spread, cuts: Cuts, rows: int, compiled: bool, policies: tuple[str, ...]) -> Lane:
        return Lane(self.by_compile[compiled], cuts, spread, rows, self.mean(spread, rows), policies)

    def mean(self, spread: Spread, rows: int) -> float:
        """Rows of a microbatch on average, on the replica that takes longest: the last of a step is shorter where
        `rows` do not divide it, and of several replicas the first, which have most microbatches, do not have that."""
        return rows if spread.copies > 1 else self.task.rows / math.ceil(self.task.rows / rows)

    @once
    def replicas(self, spread: Spread, rows: int, compiled: bool) -> Replicas:
        """The replicas of these degrees, by how fast their devices are for microbatches of so many rows."""
        return replicas_of(self.by_compile[compiled], spread, self.mean(spread, rows))

    def lane(self, choice: Choice) -> Lane:
        """The stages of a choice."""
        policies = self._policies[choice.recompute == "none" and not keeps_operations(self.task, choice)]
        return self._lane(choice.spread, self.cuts(choice), choice.microbatch, choice.compile, policies)

    @once
    def tied(self, spread: Spread) -> Tied:
        """What parts of a rank share."""
        return tied_elements(self.prices, spread)

    @once
    def _lives(self, spread: Spread) -> Lives[float]:
        return Lives(*(each.on(spread) for each in self.task.profile.lives))

    @once
    def _own(self, spread: Spread, cuts: Cuts, rank: int) -> Sizes:
        own = [cuts.sizes[stage] for stage in cuts.ranks[rank]]
        if len(own) == 1:
            return own[0]
        return replace(together([(each, 1) for each in own]), waiting=max(each.trained for each in own[:-1]))

    @once
    def products(self, spread: Spread, rows: int, compiled: bool) -> float:
        """Seconds of what a step computes and sends in microbatches of so many rows, on all devices without waiting:
        no choice with as many is below."""
        prices, step = self.by_compile[compiled], self.task.cluster.step
        alike = prices.alike(range(len(prices.pieces)))
        speeds = prices.speeds(spread, rows)
        how = rows, min(1.0, *speeds)  # a slower device does not send more slowly
        one = (1 - 1e-9) * math.fsum(number * alone(prices, place, spread, *how) for place, number in alike) / rows
        if capacity := self.replicas(spread, rows, compiled).capacity:
            return self.task.rows * one / capacity + step
        return math.ceil(self.task.rows / spread.copies) * one / math.fsum(speeds) + step

    def least(self, choice: Choice) -> float:
        """Seconds that no estimate with the stages and microbatches of `choice` is below."""
        lane = self.lane(choice)
        terms, deal, stages, _ = self._in_lane(choice, lane, lane.none(), together=False)
        if choice.schedule in HALVED:  # where more is computed again, another rank may be the slowest
            return self._at_least(choice, lane, stages, deal.number, terms)
        return math.fsum(terms.values())

    def _at_least(
        self, choice: Choice, lane: Lane, stages: Sequence[Pace], number: int, terms: Mapping[str, float]
    ) -> float:
        """Seconds that no estimate of `number` microbatches is below whose stages take as long or longer backward.
        `terms`: of such an estimate, whatever is computed again."""
        crowd, sends = self.crowd(choice.spread), self.sends(choice, number)
        works, messages = at_least(choice, lane, stages, number, crowd, sends)
        return (1 - 1e-9) * (works + sum((messages, *(terms[what] for what in APART))))

    def _flying(self, choice: Choice, rank: int, number: int) -> tuple[int, ...]:
        ranks = choice.spread.stages
        return under_way(choice.schedule, ranks, number, choice.chunks)[rank] if ranks > 1 else (1,)

    def _stands(self, choice: Choice, lane: Lane, rank: int) -> Standing:
        away = None if choice.offload is None else choice.offload.activations
        rest = choice.microbatch, choice.zero, choice.shard, away, rank
        return self._standing(choice.spread, lane.cuts, *rest)

    @once
    def _standing(
        self, spread: Spread, cuts: Cuts, rows: int, zero: int, shard: int | None, away: float | None, rank: int
    ) -> Standing:
        asked = spread, cuts, rows, zero, shard
        found = self._standing_with(*asked, away and 0.0, rank)
        if away:  # in between no more than the line between them
            key, alone = "temporaries", self._standing_with(*asked, 1.0, rank)
            found = {**found, key: (1 - away) * found[key] + away * alone[key]}
        return Standing(found, math.fsum(found.values()))

    @once
    def _standing_with(
        self, spread: Spread, cuts: Cuts, rows: int, zero: int, shard: int | None, away: float | None, rank: int
    ) -> dict[str, float]:
        offload, chunks = None if away is None else Offload(activations=away), len(cuts.numbers) // spread.stages
        choice = Choice(spread, rows, zero=zero, shard=shard, chunks=chunks, offload=offload)
        own = self._own(spread, cuts, rank)
        if own.waiting and (self._meets(choice) or spread.copies == 1):  # a backward lends to its stage's chunks alone
            own = replace(own, waiting=0.0)
        last = cuts.ranks[rank][-1] == len(cuts.numbers) - 1
        return standing(self.prices, choice, own, last, self.tied(spread), self._lives(spread))

    @once
    def _saved(self, spread: Spread, cuts: Cuts, rows: int, schedule: str, number: int) -> tuple[float, ...]:
        """Bytes of the activations of each rank of a pipeline where nothing is computed again."""
        ranks, saved = spread.stages, [size.saved["none"] for size in cuts.sizes]
        flying = under_way(schedule, ranks, number, len(saved) // ranks) if ranks > 1 else ((1,),)
        stages = zip(flying, cuts.ranks, strict=True)
        return tuple(rows * sum(many * saved[stage] for many, stage in zip(*each, strict=True)) for each in stages)

    def _plain(self, choice: Choice, lane: Lane, number: int) -> tuple[float, ...]:
        """Bytes of the activations of each rank where nothing is computed again, with up to `number` microbatches."""
        return self._saved(choice.spread, lane.cuts, choice.microbatch, choice.schedule, number)

    def _kept(
        self, choice: Choice, lane: Lane, rank: int, flying: Sequence[int], counts: Sequence[Counts]
    ) -> tuple[float, float]:
        """Bytes of the activations of a rank: those that wait for a backward, and those of the block that is computed
        again."""
        kept, again = lane.kept(rank, flying, counts)
        whole = self._own(choice.spread, lane.cuts, rank).again if again else 0.0
        return choice.microbatch * kept, choice.microbatch * whole

    def _meets(self, choice: Choice) -> bool:
        """Whether replicas run as many microbatches, since they meet in their forwards."""
        return choice.zero == 3 or choice.offload is not None or choice.spread.experts > 1

    def deal(self, choice: Choice, lane: Lane, counts: list[Counts], together: bool | None = None) -> Dealt:
        """How many microbatches each replica has."""
        return self._in_lane(choice, lane, counts, self._meets(choice) if together is None else together)[1]

    @once
    def _evenly(self, spread: Spread, rows: int, compiled: bool, exchange: str) -> bool:
        """Whether replicas have as many microbatches whatever their devices, since they count alike in the exchange."""
        option = self.task.pins.get("exchange", exchange)
        uneven = len(self.replicas(spread, rows, compiled).speeds) > 1 and option != EXACT
        return uneven and count_alike(spread.plan(exchange=option), self.task.optimizer)

    def _dealt(
        self, choice: Choice, lane: Lane, counts: Sequence[Counts], together: bool, evenly: bool
    ) -> tuple[Dealt, list[Pace], dict[int, tuple[float, dict[str, float]]]]:
        """The deal; the seconds of all stages on the replica that takes longest; what stages compute again."""
        again = {place: lane.again(place, own) for place, own in enumerate(counts)} if lane.recomputes(counts) else {}
        replicas: Replicas = self.replicas(choice.spread, choice.microbatch, choice.compile)
        whole = self.task.whole  # then each replica has one
        number = len(replicas.kinds) if whole else math.ceil(self.task.rows / choice.microbatch)
        each = math.ceil(number / len(replicas.kinds))
        halves = parted(choice.schedule, lane.ranks, each, choice.chunks)
        timed = [seconds_of(lane, speeds, again, halves) for speeds in replicas.speeds]
        paces = [(slowest(stages, lane.cuts.ranks)[1], fill_of(choice, lane, stages, each)) for stages in timed]
        pinned = tuple(self.task.pins.get("shares", ()))
        if "shares" in self.task.pins and not pinned and len(paces) > 1:
            pinned = (1,) * choice.spread.copies
        found = dealt(number, paces, replicas, () if whole or evenly else pinned, together or whole, evenly)
        return found._replace(shares=pinned) if whole else found, timed[found.slowest], again

    def _in_lane(
        self, choice: Choice, lane: Lane, counts: list[Counts], together: bool
    ) -> tuple[dict[str, float], Dealt, tuple[Pace, ...], int]:
        """The terms that do not depend on what copies of the model share; the deal; seconds of all stages, and the rank
        of the pipeline that others wait for. Found once for all that differ in where their state lies."""
        together = together and not self._have_as_many(choice)  # else it decides nothing
        evenly = self._evenly(choice.spread, choice.microbatch, choice.compile, choice.exchange)
        return self._timed(choice.spread, choice.microbatch, choice.schedule, lane, tuple(counts), together, evenly)

    def _have_as_many(self, choice: Choice) -> bool:
        """Whether all replicas have as many microbatches in any case."""
        alike = len(self.replicas(choice.spread, choice.microbatch, choice.compile).speeds) == 1
        return alike and not self.task.pins.get("shares")

    @once
    def _timed(
        self,
        spread: Spread,
        rows: int,
        schedule: str,
        lane: Lane,
        counts: tuple[Counts, ...],
        together: bool,
        evenly: bool,
    ) -> tuple[dict[str, float], Dealt, tuple[Pace, ...], int]:
        chunks = lane.stages // lane.ranks
        numbers = lane.cuts.numbers
        choice = Choice(spread, rows, schedule=schedule, chunks=chunks, compile=lane.compiled, stages=numbers)
        deal, stages, again = self._dealt(choice, lane, counts, together, evenly)
        number, ranks = deal.number, lane.ranks
        slow, busy = slowest(stages, lane.cuts.ranks)
        busy *= number
        sent: dict[str, float] = {}
        for place in lane.cuts.ranks[slow]:
            repeated = again[place][1] if again else {}
            for sends, times in ((lane.works[place].sent, number), (repeated, number * (1 + stages[place].parted))):
                for what, seconds in sends.items():
                    sent[what] = sent.get(what, 0.0) + times * seconds
        terms = {"compute": busy - math.fsum(sent.values()), **sent}
        if ranks > 1:
            crowd, full = self.crowd(spread), (fill_of(choice, lane, stages, number), self.sends(choice, number))
            least = number * shared(of_ranks(stages, lane.cuts.ranks), crowd)
            terms["bubble"], terms["stages"] = waits(*full, busy, crowd, least)
        terms["data"] = number * self.mean(spread, rows) * self.task.cluster.data
        computing = number * math.fsum(
            each.forward + each.backward for each in (lane.works[stage] for stage in lane.cuts.ranks[0])
        )
        terms["other"] = self.task.cluster.step + agreed(self.prices, choice, number, computing)
        return terms, deal, tuple(stages), slow

    def crowd(self, spread: Spread) -> Crowd:
        """How the ranks of a pipeline share cores."""
        per_host, ranks = self.task.cluster.per_host, spread.size // spread.stages  # of a stage
        return Crowd(self.prices.slowest.crowd, per_host, min(spread.stages, max(1, per_host // ranks)))

    def sends(self, choice: Choice, number: int) -> float:
        """Seconds in which a pipeline waits for messages in a step of `number` microbatches, where nothing else is done
        meanwhile."""
        hops = (choice.spread.stages - 1) * choice.chunks + number * choice.chunks * (1 - self.task.cluster.overlap)
        return 2 * hops * self.message(choice)

    def message(self, choice: Choice) -> float:
        """Seconds of what travels between two stages, the longest way."""
        spread = choice.spread
        if spread.stages == 1:
            return 0.0
        sizes = self.cuts(choice).sizes
        link = self.task.cluster.link(spread.stride("stages"), spread.stages, "send")
        return link.seconds("send", max(each.boundary for each in sizes[1:]) * self.mean(spread, choice.microbatch), 2)

"""The search: branch and bound over degrees, microbatches, recompute, schedules, ZeRO stages and tiers by closed forms,
then the real lists of actions for the best.

A bound for degrees is what their products take on all devices without communication, waiting or recompute: degrees
that cannot beat the candidates found so far are left out. Everything is ordered by (seconds, plan), so that the same
question has the same answer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Any

from shoal.errors import UserError
from shoal.plan import option_name, option_parameters
from shoal.planner.costs import POLICIES, Prices, Sizes, together
from shoal.planner.degrees import Spread, degrees
from shoal.planner.exchanges import exchanged, moved, updated
from shoal.planner.held import memory, tied_elements
from shoal.planner.pipes import cut, fill, simulated
from shoal.planner.task import Choice, Estimate, Found, Task, spoken

BEST = 12
"""Candidates that are kept for the simulation of events."""
LONGEST = 64
"""Microbatches of more rows are not tried: products are at their best rate long before."""


@dataclass(frozen=True)
class _Lane:
    """The stages of a rank that others wait for, with a microbatch of one size. `seconds`: of forward and backward of
    all stages of the pipeline, with what is sent; of the slowest rank `terms` of a microbatch, and `forward` and
    `backward`."""

    seconds: tuple[tuple[float, float], ...]
    terms: dict[str, float]
    forward: float
    backward: float
    slow: int


@dataclass(frozen=True)
class _Cut:
    """The pieces of each stage, the distinct ones with their numbers, and what a rank holds of it."""

    numbers: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, int], ...], ...]
    sizes: tuple[Sizes, ...]


class Search:
    """The choices of a task, and what each costs."""

    def __init__(self, task: Task) -> None:
        self.task, self.prices = task, Prices(task)
        self._tied = tied_elements(self.prices)
        self._best: list[tuple[float, int, Estimate]] = []
        self._lane = cache(self._stages)
        self._cuts = cache(self._cut)

    def spreads(self) -> list[Spread]:
        """All degrees that the model, the pins and the number of devices allow."""
        task, pieces = self.task, len(self.prices.pieces)
        most = {**task.legal, "stages": min(pieces, task.legal.get("stages", pieces))}
        return [each for each in degrees(task.cluster.size, most, task.pins) if each.copies <= task.rows]

    def bound(self, spread: Spread) -> float:
        """Seconds that no choice of these degrees is faster than."""
        per, rows = self._per(spread), min(self._per(spread), LONGEST)
        alike = self.prices.alike(range(len(self.prices.pieces)))
        spent = [(self.prices.spent(place, spread, rows).total("none"), number) for place, number in alike]
        one = math.fsum(number * (forward + backward) for (forward, backward), number in spent) / rows
        return per * one / math.fsum(self.prices.speeds(spread.stages)) + self.task.cluster.step

    def run(self) -> Found:
        """Searches. Of equal seconds the first in the order of degrees and options wins."""
        bounds = sorted((self.bound(each), place, each) for place, each in enumerate(self.spreads()))
        self._best = []
        nearest: Estimate | None = None
        priced = bounded = 0
        host = 0.8 * min(host.memory / host.count for host in self.task.cluster.hosts)
        for bound, _, spread in bounds:
            if bound >= self._worst:
                bounded += 1
                continue
            for choice in self.choices(spread):
                estimate = self.estimate(choice)
                priced += 1
                if estimate.bytes > self.task.most or estimate.on_host > host:
                    if nearest is None or estimate.bytes < nearest.bytes:
                        nearest = estimate
                elif estimate.seconds < self._worst:
                    entry = (-estimate.seconds, -priced, estimate)
                    (heapq.heappush if len(self._best) < BEST else heapq.heapreplace)(self._best, entry)
        ranked = [self.simulated(each) for _, _, each in sorted(self._best, reverse=True)]
        ranked.sort(key=lambda each: each.seconds)  # stable: of equal ones the first stays
        return Found(tuple(ranked), priced, len(bounds), bounded, nearest)

    @property
    def _worst(self) -> float:
        """Seconds that a candidate has to stay below."""
        return -self._best[0][0] if len(self._best) == BEST else math.inf

    def choices(self, spread: Spread) -> Iterator[Choice]:
        """The choices of these degrees."""
        task, pins = self.task, self.task.pins
        recompute = [option_name(pins["recompute"], "recompute")] if "recompute" in pins else list(task.recompute)
        tiers = self._tiers(spread)
        for rows, (schedule, chunks) in product(self._microbatches(spread), self._schedules(spread)):
            for again in recompute:
                first = Choice(spread, rows, 0, None, again if again in POLICIES else "none", schedule, chunks)
                if math.fsum(self._in_lane(first).values()) < self._worst:
                    yield from (replace(first, zero=zero, shard=shard, offload=away) for zero, shard, away in tiers)

    def _per(self, spread: Spread) -> int:
        """Rows of a replica in a step."""
        return math.ceil(self.task.rows / spread.copies)

    def _microbatches(self, spread: Spread) -> list[int]:
        per = self._per(spread)
        if self.task.microbatch is not None:
            return [min(self.task.microbatch, per)]
        return sorted({1 << power for power in range(LONGEST.bit_length()) if 1 << power <= per} | {min(per, LONGEST)})

    def _schedules(self, spread: Spread) -> list[tuple[str, int]]:
        if spread.stages == 1:
            return [("1f1b", 1)]
        pieces = len(self.prices.pieces)
        schedules = list(self.task.schedules)
        if "schedule" in self.task.pins:
            name = option_name(self.task.pins["schedule"], "schedule")
            chunks = option_parameters(self.task.pins["schedule"]).get(
                "chunks", {"interleaved": 2, "zbv": 2}.get(name, 1)
            )
            schedules = [(name, int(chunks))]
        return [(name, chunks) for name, chunks in schedules if chunks * spread.stages <= pieces]

    def _tiers(self, spread: Spread) -> list[tuple[int, int | None, bool]]:
        pins, cluster = self.task.pins, self.task.cluster
        stages = [0] if spread.replicas == 1 else [0, 1, 2, 3]
        stages = [pins["zero"]] if "zero" in pins else stages
        within = cluster.per_host // (spread.parts * spread.tokens)
        shards: list[int | None] = [None]
        if "shard" in pins:
            shards = [pins["shard"]]
        elif 1 < within < spread.copies and spread.copies % within == 0 and spread.experts <= within * spread.tokens:
            shards.append(within)
        on_host = [False] if any(device.on_host for device in cluster.devices) else [False, True]
        on_host = [pins["memory"] is not None] if "memory" in pins else on_host
        return [
            (zero, shard if zero else None, offload)
            for zero, shard, offload in product(stages, shards, on_host)
            if zero or shard == shards[0]
        ]

    def _cut(self, spread: Spread, stages: int) -> _Cut:
        prices, number = self.prices, len(self.prices.pieces)
        given = self.task.pins.get("stages")
        if stages == 1:
            numbers = [number]
        elif isinstance(given, list) and len(given) == stages and all(isinstance(each, int) for each in given):
            numbers = list(given)
        else:
            costs = [sum(prices.spent(place, spread, 1).total("none")) for place in range(number)]
            speeds = prices.speeds(spread.stages)
            numbers = cut(costs, stages, [speeds[stage % spread.stages] for stage in range(stages)])
        starts = [0, *accumulate(numbers)]
        pieces = tuple(prices.alike(range(*each)) for each in pairwise(starts))
        sizes = tuple(together([(prices.sizes(place, spread), many) for place, many in stage]) for stage in pieces)
        return _Cut(tuple(numbers), pieces, sizes)

    def _stages(self, spread: Spread, rows: int, recompute: str, chunks: int) -> _Lane:
        pieces, speeds, ranks = (
            self._cuts(spread, spread.stages * chunks).pieces,
            self.prices.speeds(spread.stages),
            spread.stages,
        )
        seconds, terms = [], []
        known: dict[Any, tuple[tuple[float, float], dict[str, float]]] = {}  # most stages are like others
        for stage, own in enumerate(pieces):
            key = own, speeds[stage % ranks]
            if key in known:
                seconds.append(known[key][0])
                terms.append(known[key][1])
                continue
            forward, backward, moves = 0.0, 0.0, {"compute": 0.0}
            for place, number in own:
                spent = self.prices.spent(place, spread, rows)
                there, back = spent.total(recompute)
                forward, backward = forward + number * there, backward + number * back
                twice = spent.sent_forward if recompute == "full" else ()
                for what, each in (*spent.sent_forward, *spent.sent_backward, *twice):
                    moves[what] = moves.get(what, 0.0) + number * each
            busy, sent, speed = forward + backward, sum(moves.values()), speeds[stage % ranks]
            moves["compute"] = (busy - sent) / speed
            scale = (moves["compute"] + sent) / busy if busy else 1.0
            known[key] = (forward * scale, backward * scale), moves
            seconds.append(known[key][0])
            terms.append(moves)
        slow = max(range(ranks), key=lambda rank: sum(sum(each) for each in seconds[rank::ranks]))
        sums: dict[str, float] = {}
        for moves in terms[slow::ranks]:
            for what, each in moves.items():
                sums[what] = sums.get(what, 0.0) + each
        forward, backward = (sum(each[way] for each in seconds[slow::ranks]) for way in (0, 1))
        return _Lane(tuple(seconds), sums, forward, backward, slow)

    def _in_lane(self, choice: Choice) -> dict[str, float]:
        """The terms that do not depend on what copies of the model share."""
        spread, number = choice.spread, math.ceil(self._per(choice.spread) / choice.microbatch)
        lane = self._lane(spread, choice.microbatch, choice.recompute, choice.chunks)
        terms = {what: number * seconds for what, seconds in lane.terms.items()}
        if (ranks := spread.stages) > 1:
            terms["bubble"] = fill(choice.schedule, ranks, choice.chunks, lane.forward, lane.backward)
            hops = (ranks - 1) * choice.chunks + number * choice.chunks * (1 - self.task.cluster.overlap)
            terms["stages"] = 2 * hops * self.message(choice)
        terms["other"] = self.task.cluster.step
        return terms

    def estimate(self, choice: Choice) -> Estimate:
        """What `choice` takes and holds, by closed forms; what travels is left out (see `simulated`)."""
        spread, prices, ranks = choice.spread, self.prices, choice.spread.stages
        number = math.ceil(self._per(spread) / choice.microbatch)
        lane = self._lane(spread, choice.microbatch, choice.recompute, choice.chunks)
        found = self._cuts(spread, ranks * choice.chunks)
        own = found.sizes[lane.slow :: ranks]
        sizes = own[0] if len(own) == 1 else together([(each, 1) for each in own])
        tied = self._tied if ranks == 1 else 0.0
        window = lane.backward, number * (lane.forward + lane.backward)
        terms = self._in_lane(choice)
        terms["copies"], wire = exchanged(prices, choice, sizes, number, window, tied)
        terms["offload"] = moved(prices, choice, sizes, number, window[1])
        terms["optimizer"] = updated(prices, choice, sizes, tied)
        held, host = memory(prices, choice, found.sizes, number, self._tied)
        stages = found.numbers if ranks > 1 else ()
        return Estimate(replace(choice, stages=stages), terms, held, host, wire, number)

    def message(self, choice: Choice) -> float:
        """Seconds of what travels between two stages, the longest way."""
        spread = choice.spread
        if spread.stages == 1:
            return 0.0
        sizes = self._cuts(spread, spread.stages * choice.chunks).sizes
        link = self.task.cluster.link(spread.stride("stages"), spread.stages, "send")
        return link.seconds("send", max(each.boundary for each in sizes[1:]) * choice.microbatch, 2)

    def simulated(self, estimate: Estimate) -> Estimate:
        """The estimate with the bytes that travel, and of a pipeline with the waiting that its schedule's own lists of
        actions have."""
        choice, terms, spread = estimate.choice, dict(estimate.terms), estimate.choice.spread
        lane = self._lane(spread, choice.microbatch, choice.recompute, choice.chunks)
        found, wire = self._cuts(spread, spread.stages * choice.chunks), dict(estimate.wire)
        for place, many in (each for stage in found.pieces[lane.slow :: spread.stages] for each in stage):
            for what, nbytes in self.prices.wire(place, spread, choice.microbatch).items():
                wire[what] = wire.get(what, 0.0) + many * estimate.microbatches * nbytes
        if spread.stages > 1:
            ends = sum(each.boundary for each in found.sizes[1:]) / (len(found.sizes) - 1)
            wire["stages"] = 2 * choice.chunks * estimate.microbatches * ends * choice.microbatch
            total = simulated(
                choice.schedule,
                spread.stages,
                estimate.microbatches,
                choice.chunks,
                lane.seconds,
                self.message(choice),
            )
            busy = math.fsum(terms.get(what, 0.0) for what in ("compute", "parts", "tokens", "experts"))
            terms["bubble"] = max(0.0, total - busy - terms["stages"])
        return replace(estimate, terms=terms, wire=wire, stages=lane.seconds, message=self.message(choice))


def search(task: Task) -> Found:
    """Finds the fastest plans. Raises UserError where no degrees are legal, or nothing fits."""
    found = Search(task).run()
    if not found.spreads:
        raise UserError(_no_degrees(task))
    if not found.best:
        assert found.nearest is not None
        near = found.nearest
        raise UserError(
            f"no plan fits: the one that needs least, {spoken(near.choice.plan(task.pins).to_dict())} with "
            f"microbatches of {near.choice.microbatch}, takes {near.bytes / 2**30:,.1f} GiB of a rank, which may use "
            f"{task.most / 2**30:,.1f} GiB. Take more devices, a smaller model, shorter rows, or free what is pinned"
        )
    return found


def _no_degrees(task: Task) -> str:
    pinned = spoken(task.pins)
    return (
        f"no degrees fit {task.cluster.size} devices, {task.rows} rows a step and {len(task.profile.parts)} parts of "
        f"the model{f' with {pinned}' if pinned else ''}: free a pin, or take another number of devices"
    )

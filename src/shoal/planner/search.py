"""The search: branch and bound over degrees, microbatches, schedules, ZeRO stages and tiers by closed forms (see
estimates, which find for each how blocks are computed again and how many microbatches each replica has), then the real
lists of actions for the best.

A bound for degrees is what their products take on all devices without communication, waiting or recompute: degrees
that cannot beat the candidates found so far are left out. Everything is ordered by (seconds, plan), so that the same
question has the same answer.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import product

from shoal import units
from shoal.assembly.compatibility import check_exchange
from shoal.errors import UserError
from shoal.pipeline.units import check_numbers
from shoal.plan import option_name, option_parameters
from shoal.planner.costs import COMPILING
from shoal.planner.degrees import PINS, Spread, degrees
from shoal.planner.estimates import Begun, Estimates
from shoal.planner.lanes import alone
from shoal.planner.task import EXACT, Choice, Estimate, Found, Offload, Task, spoken

BEST = 12
"""Candidates that are kept for the simulation of events."""
WAITING = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the activations that wait on the host, that are tried."""
SURE = 0.05
"""The share of a step that compiling blocks has to spare: predictions are off by about as much."""
LONGEST = 64
"""Microbatches of more rows are not tried: products are at their best rate long before."""


class Search(Estimates):
    """The choices of a task, and what each costs."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._best: list[tuple[float, int, Estimate]] = []

    def spreads(self) -> list[Spread]:
        """All degrees that the model, the pins and the number of devices allow."""
        task, pieces = self.task, len(self.prices.pieces)
        most = {**task.legal, "stages": min(pieces, task.legal.get("stages", pieces))}
        found = [each for each in degrees(task.cluster.size, most, task.pins) if each.copies <= task.rows]
        if isinstance(given := task.pins.get("stages"), list) and all(isinstance(each, int) for each in given):
            check_numbers(given, pieces)
        shares, shard = task.pins.get("shares"), task.pins.get("shard")
        found = [each for each in found if not shares or each.copies == len(shares)]
        return [each for each in found if self._schedules(each) and (shard is None or _can_share(each, shard))]

    def bound(self, spread: Spread) -> float:
        """Seconds that no choice of these degrees is faster than."""
        per, rows = self._per(spread), min(self._per(spread), LONGEST)
        alike = self.prices.alike(range(len(self.prices.pieces)))
        one = min(
            math.fsum(number * alone(self.by_compile[compiled], place, spread, rows) for place, number in alike) / rows
            for compiled in self.compiles
        )
        if capacity := self.replicas(spread).capacity:
            return self.task.rows * one / capacity + self.task.cluster.step
        return per * one / math.fsum(self.prices.speeds(spread.stages)) + self.task.cluster.step

    def run(self) -> Found:
        """Searches. Of equal seconds the first in the order of degrees and options wins."""
        bounds = sorted((self.bound(each), place, each) for place, each in enumerate(self.spreads()))
        self._best = []
        nearest: Begun | None = None
        priced = bounded = 0
        for bound, _, spread in bounds:
            if bound >= self._worst:
                bounded += 1
                continue
            enough: set[Choice] = set()
            for choice in self.choices(spread):
                if choice.offload and any(each in enough for each in _nearer(choice, choice.offload)):
                    continue
                priced += 1
                if self._is_slow(choice):
                    continue
                begun = self.begun(choice, self.counts(choice))
                if (fits := self.fits(begun)) and (choice.offload or self._at_ease(begun)):
                    enough.add(choice)
                if not fits:
                    if nearest is None or begun.bytes < nearest.bytes:
                        nearest = begun
                elif self._ranked(choice, math.fsum(begun.terms.values())) < self._worst:
                    estimate = self.finished(begun)
                    if (seconds := self.rank(estimate)) < self._worst:
                        entry = (-seconds, -priced, estimate)
                        (heapq.heappush if len(self._best) < BEST else heapq.heapreplace)(self._best, entry)
        ranked = [self.simulated(each) for _, _, each in sorted(self._best, reverse=True)]
        ranked.sort(key=self.rank)  # stable: of equal ones the first stays
        near = None if nearest is None else self.finished(nearest)
        return Found(tuple(ranked), priced, len(bounds), bounded, near)

    def _is_slow(self, choice: Choice) -> bool:
        """Whether a choice is slower than the candidates however its blocks are treated, and no other one is left out
        where it fits (see _nearer): what it needs of memory is not asked then."""
        if math.isinf(self._worst) or (choice.offload and any(each and each.disk for each in self.offloads)):
            return False
        seconds, again = self.floor(choice)
        return (again or choice.offload is not None) and self._ranked(choice, seconds) >= self._worst

    def fits(self, estimate: Estimate | Begun) -> bool:
        """Whether the fullest rank has room for what it holds, on its device and on its host, which may be one."""
        if self.prices.slowest.on_host:
            return estimate.bytes + estimate.on_host <= self.task.most
        return estimate.bytes <= self.most(estimate.choice) and estimate.on_host <= self.task.cluster.host_memory

    def _at_ease(self, begun: Begun) -> bool:
        """Whether nothing is computed again but what a pin says."""
        return "recompute" in self.task.pins or self._option(begun.lane, begun.counts) == "none"

    @cached_property
    def compiles(self) -> tuple[bool, ...]:
        """Whether blocks are compiled, the fastest first."""
        if "compile" in self.task.pins:
            return (self.task.pins["compile"] in (True, "inductor"),)  # other backends fuse nothing
        kept = "selective" in str(self.task.pins.get("recompute"))  # of operations, which compiled blocks do not show
        return (True, False) if self.task.compiled and not kept else (False,)

    def rank(self, estimate: Estimate) -> float:
        """Seconds of a step by which candidates are ranked: with compiled blocks they have to be `SURE` to be fewer,
        and a step has its share of what compiling takes before the first one."""
        return self._ranked(estimate.choice, estimate.seconds)

    def _ranked(self, choice: Choice, seconds: float) -> float:
        if not choice.compile or "compile" in self.task.pins:
            return seconds
        return (1 + SURE) * seconds + COMPILING * self._kinds / (self.task.steps or math.inf)

    @cached_property
    def _kinds(self) -> int:
        """Kinds of blocks, each of which is compiled."""
        return len({part.kind for part in self.task.profile.parts if part.is_block})

    @property
    def _worst(self) -> float:
        """Seconds that a candidate has to stay below."""
        return -self._best[0][0] if len(self._best) == BEST else math.inf

    def choices(self, spread: Spread) -> Iterator[Choice]:
        """The choices of these degrees."""
        tiers, kinds = self._tiers(spread), product(self._schedules(spread), self.compiles)
        for rows, ((schedule, chunks), compiled) in product(self._microbatches(spread), list(kinds)):
            first = Choice(spread, rows, schedule=schedule, chunks=chunks, compile=compiled)
            if math.isinf(self._worst) or self.least(first) < self._worst:
                tiered = [replace(first, zero=zero, shard=shard, offload=away) for zero, shard, away in tiers]
                yield from (replace(each, exchange=how) for each in tiered for how in self._exchanges(each))

    def _exchanges(self, choice: Choice) -> Iterator[str]:
        """The exchanges that go with a choice, of those that may be."""
        if "exchange" in self.task.pins or choice.spread.replicas == 1:
            yield EXACT
            return
        for name in self.task.exchanges:
            if name == EXACT or _goes_with(name, choice.spread, choice.zero, choice.offload is not None):
                yield name

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
        given = self.task.pins.get("stages")
        numbers = range(pieces + 1) if given is None else (len(given),)
        return [(name, chunks) for name, chunks in schedules if chunks * spread.stages in numbers]

    def _tiers(self, spread: Spread) -> list[tuple[int, int | None, Offload | None]]:
        """ZeRO stages, how many ranks share a copy, and what lies elsewhere than on the device, in that order: from as
        little as can be on."""
        pins, cluster = self.task.pins, self.task.cluster
        stages = [0] if spread.replicas == 1 else [0, 1, 2, 3]
        if pins.get("shard") is not None:
            stages = [1, 2, 3]  # zero = 0 has nothing to share
        if "zero" in pins:
            stages = [pins["zero"]]
        within = cluster.per_host // (spread.parts * spread.tokens)
        shards: list[int | None] = [None]
        if "shard" in pins:
            shards = [pins["shard"]]
        elif 1 < within < spread.copies and spread.copies % within == 0 and spread.experts <= within * spread.tokens:
            shards.append(within)
        return [
            (zero, shard if zero else None, offload)
            for zero, shard, offload in product(stages, shards, self.offloads)
            if (zero or shard == shards[0]) and (not offload or zero in (0, stages[-1]))  # it cuts as ZeRO 3 does
        ]

    @cached_property
    def offloads(self) -> list[Offload | None]:
        """What may lie elsewhere than on the device. Within a tier the chunks that fit stay (see held), so all that is
        chosen is how many bytes that is, the share of the activations, and whether there is a disk."""
        pins, cluster = self.task.pins, self.task.cluster
        if "memory" in pins:
            said = pins["memory"]
            return [None if said is None else Offload.of(said, self.task.most)]
        scratch = cluster.hosts[0].scratch if cluster.disk else None
        if any(device.on_host for device in cluster.devices):  # one memory: only a disk has more
            return [None, *([] if scratch is None else [Offload(disk=scratch)])]
        on_host = [Offload(self.task.most, activations=share) for share in WAITING]
        on_disk = [replace(each, host=cluster.host_memory, disk=scratch) for each in on_host]
        return [None, *on_host, *([] if scratch is None else on_disk)]


@lru_cache(maxsize=4096)
def _goes_with(exchange: str, spread: Spread, zero: int, offloads: bool) -> bool:
    """Whether an engine would take such an exchange beside the rest of a plan."""
    try:
        check_exchange(spread.plan(exchange=exchange, zero=zero, memory={} if offloads else None), "whole")
    except UserError:
        return False
    return True


def _can_share(spread: Spread, shard: int) -> bool:
    """Whether so many ranks of these degrees can share a copy of the state."""
    try:
        spread.plan(zero=3, shard=shard).check_groups()
    except UserError:
        return False
    return True


def _nearer(choice: Choice, away: Offload) -> list[Choice]:
    """Choices that keep more nearer by than `choice`: where they fit, nothing is to go farther. Everything on the
    device, or on the host what would go to the disk."""
    on_host = [] if away.disk is None else [replace(away, host=None, disk=None)]
    return [replace(choice, offload=each) for each in (None, *on_host)]


def search(task: Task) -> Found:
    """Finds the fastest plans. Raises UserError where no degrees are legal, or nothing fits."""
    found = Search(task).run()
    if not found.spreads:
        raise UserError(_no_degrees(task))
    if not found.best:
        assert found.nearest is not None
        near = found.nearest
        plan = spoken(near.choice.plan(task.pins).to_dict()) or "one rank"
        raise UserError(
            f"no plan fits: the one that needs least, {plan} with microbatches of {near.choice.microbatch}, takes "
            f"{units.enough(near.bytes)} of a rank, which may use {units.size(task.most)}. Take more devices, or ones "
            f"with more memory, a smaller model or shorter rows{', or free what is pinned' if task.pins else ''}"
        )
    return found


def _no_degrees(task: Task) -> str:
    pinned, context = spoken(task.pins), task.pins.get("context")
    asked = [what for field, what in PINS.items() if task.pins.get(field, 1) != 1]
    ways = ["ring" if what == "tokens" and context == "ring" else what for what in asked]
    whys = dict.fromkeys(filter(None, (task.profile.refused.get(what) for what in ways)))
    remedy = "; ".join(whys) or f"{'free a pin, or ' if pinned else ''}take another number of devices"
    if not whys and {"stages", "schedule"} & set(task.pins):
        remedy = f"stages are plan.pp times the chunks of the schedule, each of a block at least; {remedy}"
    return (
        f"no degrees fit {task.cluster.size} devices, {task.rows} rows a step and {len(task.profile.parts)} parts of "
        f"the model{f' with {pinned}' if pinned else ''}: {remedy}"
    )

"""The choices of a task: degrees, microbatches, schedules, ZeRO stages, tiers and exchanges that the model, the cluster
and what is pinned allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import product
from typing import Any

from shoal.assembly.compatibility import check_exchange
from shoal.data.cursor import in_shares
from shoal.errors import UserError
from shoal.exchange.named import algorithm
from shoal.module.selective import selects
from shoal.pipeline.units import check_numbers
from shoal.plan import Option, option_name, option_parameters
from shoal.planner.degrees import FIELDS, Spread, degrees
from shoal.planner.estimates import Estimates
from shoal.planner.policies import keeps_operations
from shoal.planner.task import EXACT, Choice, Offload, Task

WAITING = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the activations that wait on the host, that are tried."""
LONGEST = 64
"""Microbatches of more rows are not tried: products are at their best rate long before."""

Tier = tuple[int, int | None, Offload | None, str]
"""What a choice has beside its degrees, microbatch and schedule: ZeRO stage, shard, what lies elsewhere, exchange."""


class Choices(Estimates):
    """The choices of a task."""

    def __init__(self, task: Task, known: Estimates | None = None) -> None:
        super().__init__(task, known)
        self._whys: dict[tuple[str, Spread, int, bool], str] = {}

    def spreads(self) -> list[Spread]:
        """All degrees that the model, the pins and the number of devices allow."""
        task, pieces = self.task, len(self.prices.pieces)
        most = {**task.legal, "stages": min(pieces, task.legal.get("stages", pieces))}
        found = [each for each in degrees(task.cluster.size, most, task.pins) if each.copies <= task.rows]
        if isinstance(given := task.pins.get("stages"), list) and all(isinstance(each, int) for each in given):
            check_numbers(given, pieces)
        shares, shard = task.pins.get("shares"), task.pins.get("shard")
        found = [each for each in found if not shares or each.copies == len(shares)]
        found = [each for each in found if each.replicas > island(task)]
        return [each for each in found if self._schedules(each) and (shard is None or can_share(each, shard))]

    def choices(self, spread: Spread) -> Iterator[Choice]:
        """The choices of these degrees."""
        for first in self.firsts(spread):
            for tier in self.tiers(spread):
                yield with_tier(first, tier)

    def firsts(self, spread: Spread) -> Iterator[Choice]:
        """The choices of these degrees with all on the device, and exact."""
        kinds = product(self._microbatches(spread), self._schedules(spread), self.compiles)
        free = "compile" not in self.task.pins and selects(self.task.pins.get("recompute", "none"))
        for rows, (schedule, chunks), compiled in kinds:
            choice = Choice(spread, rows, schedule=schedule, chunks=chunks, compile=compiled)
            if not free or keeps_operations(self.task, choice):
                yield choice

    def _exchanges(self, spread: Spread, zero: int, away: Offload | None) -> Iterator[str]:
        """The exchanges that go with the rest of a choice, of those that may be."""
        if "exchange" in self.task.pins:
            if not self._why_not(self.task.pins["exchange"], spread, zero, away is not None):
                yield EXACT
            return
        for name in self.task.exchanges if spread.replicas > 1 else (EXACT,):
            if name == EXACT or not self._why_not(name, spread, zero, away is not None):
                yield name

    def _why_not(self, exchange: Option, spread: Spread, zero: int, offloads: bool) -> str:
        """Why an engine would not take such an exchange beside the rest of a plan; "" if it would."""
        key = str(exchange), spread, zero, offloads
        if key not in self._whys:
            others: dict[str, Any] = {"memory": {} if offloads else None, "shares": self.task.pins.get("shares", ())}
            try:
                plan = spread.plan(exchange=exchange, zero=zero, **others)
                check_exchange(plan, "whole", make=self.task.optimizer)
                self._whys[key] = ""
            except UserError as error:
                self._whys[key] = str(error)
        return self._whys[key]

    def why_none(self) -> str:
        """Why no choice is left, where the exchange that is pinned goes with none."""
        stages = [self.task.pins["zero"]] if "zero" in self.task.pins else [0, 1, 2, 3]
        each = product(self.spreads(), stages, [self.offloads[0] is not None])
        whys = dict.fromkeys(self._why_not(self.task.pins["exchange"], *one) for one in each)
        return "; ".join(list(whys)[:3])

    def _per(self, spread: Spread) -> int:
        """Rows of a step of the replica that has most."""
        shares = tuple(self.task.pins.get("shares") or ())
        return max(in_shares(self.task.rows, shares)) if shares else math.ceil(self.task.rows / spread.copies)

    def _microbatches(self, spread: Spread) -> list[int]:
        per = self._per(spread)
        if self.task.microbatch is not None:
            return [per if self.task.whole else min(self.task.microbatch, self.task.rows)]
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

    def tiers(self, spread: Spread) -> Iterator[Tier]:
        """ZeRO stages, how many ranks share a copy, and what lies elsewhere than on the device, in that order: from as
        little as can be on; and how replicas agree."""
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
        for zero, shard, away in product(stages, shards, self.offloads):
            if (zero or shard == shards[0]) and (not away or zero in (0, stages[-1])):  # it cuts as ZeRO 3 does
                for how in self._exchanges(spread, zero, away):
                    yield zero, shard if zero else None, away, how

    @cached_property
    def offloads(self) -> list[Offload | None]:
        """What may lie elsewhere than on the device. Within a tier the chunks that fit stay (see held), so all that is
        chosen is how many bytes that is, the share of the activations, and whether there is a disk."""
        pins, cluster = self.task.pins, self.task.cluster
        if "memory" in pins:
            said = pins["memory"]
            away = None if said is None else Offload.of(said, self.task.most)
            if away and away.disk is not None and not cluster.disk:
                raise UserError(
                    f"plan.memory.disk = {away.disk!r}: a host of {cluster.name} has no disk whose rate is known "
                    "(disk = 0): give disk, bytes a second of a host, in [[hosts]] of a cluster file, or leave out disk"
                )
            return [away]
        scratch = cluster.hosts[0].scratch if cluster.disk else None
        if any(device.on_host for device in cluster.devices):  # one memory: only a disk has more
            return [None, *([] if scratch is None else [Offload(disk=scratch)])]
        on_host = [Offload(self.task.most, activations=share) for share in WAITING]
        on_disk = [each._replace(host=cluster.host_memory, disk=scratch) for each in on_host]
        return [None, *on_host, *([] if scratch is None else on_disk)]

    @cached_property
    def nearer(self) -> dict[Offload, list[Offload | None]]:
        """What keeps more nearer by than each of `offloads`: where that fits, nothing is to go farther. Everything on
        the device, or on the host what would go to the disk."""
        return {
            away: [None, *([] if away.disk is None else [away._replace(host=None, disk=None)])]
            for away in self.offloads
            if away
        }

    @cached_property
    def compiles(self) -> tuple[bool, ...]:
        """Whether blocks are compiled, the fastest first."""
        if "compile" in self.task.pins:
            return (self.task.pins["compile"] in (True, "inductor"),)  # other backends fuse nothing
        return (True, False) if self.task.compiled else (False,)


def island(task: Task) -> int:
    """How many replicas train as one where an exchange is pinned whose replicas train apart, and there can be several
    such: who pins it wants several. 0 elsewhere."""
    pins = task.pins
    if "exchange" not in pins or pins.get(FIELDS["copies"]) == 1:
        return 0
    its = algorithm(pins["exchange"])
    ranks = getattr(its, "ranks", 1) if its.trains_apart else 0
    return ranks if task.cluster.size > ranks else 0


def with_tier(first: Choice, tier: Tier) -> Choice:
    """Returns a choice with the degrees, microbatch and schedule of `first`."""
    zero, shard, away, how = tier
    one = first.spread, first.microbatch, zero, shard, first.recompute, first.schedule, first.chunks, away, how
    return Choice(*one, first.compile, first.stages, first.shares)


def can_share(spread: Spread, shard: int) -> bool:
    """Whether so many ranks of these degrees can share a copy of the state."""
    try:
        spread.plan(zero=3, shard=shard).check_groups()
    except UserError:
        return False
    return True

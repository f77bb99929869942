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
from collections.abc import Iterable
from functools import cache, partial
from itertools import product

from shoal import units
from shoal.assembly.replan import without_collections
from shoal.errors import UserError
from shoal.planner.choices import LONGEST, Tier, with_tier
from shoal.planner.degrees import Spread
from shoal.planner.estimates import Begun, Estimates
from shoal.planner.no_degrees import NoDegrees, no_degrees
from shoal.planner.no_room import NoRoom, more_room
from shoal.planner.recut import ACTIONS, FURTHER, Recut, few
from shoal.planner.task import Choice, Estimate, Found, Offload, Task
from shoal.toml import plan_text

BEST = 12
"""Candidates that are kept for the simulation of events."""


class Search(Recut):
    """The choices of a task, from the fastest on."""

    def __init__(self, task: Task, known: Estimates | None = None) -> None:
        super().__init__(task, known)
        self._begin(math.inf)

    def _begin(self, below: float) -> None:
        """Forgets what was priced; candidates have to stay below so many seconds."""
        self._best: list[tuple[float, int, Estimate]] = []
        self._later: list[tuple[float, int, Begun]] = []
        self._short: list[tuple[float, int, Begun]] = []
        self._below, self._priced = below, 0
        self._nearest: Begun | None = None

    def bound(self, spread: Spread) -> float:
        """Seconds that no choice of these degrees is faster than: of microbatches as large as can be, which take less a
        row, unless they were tried and found to differ."""
        rows = self._microbatches(spread) if self.task.probed else [min(self._per(spread), LONGEST)]
        return min(self.products(spread, *each) for each in product(rows, self.compiles))

    def run(self, near: Iterable[Spread] = ()) -> Found:
        """Searches. Of equal seconds the first in the order of degrees and options wins. `near`: degrees of which some
        are expected to be those of the fastest. Their choices are priced before, so that slower ones are left out from
        the start; what is found is the same."""
        with without_collections():  # it keeps what it finds, and a sixth of its time went by looking through that
            return self._run(near)

    def _run(self, near: Iterable[Spread]) -> Found:
        spreads = self.spreads()
        self._begin(self._reached([each for each in dict.fromkeys(near) if each in spreads]))
        bounded = 0
        for bound, _, spread in sorted((self.bound(each), place, each) for place, each in enumerate(spreads)):
            if bound >= self._worst:
                bounded += 1
                continue
            self._price(spread)
        self._compute_more()
        ranked = [self.simulated(each) for _, _, each in sorted(self._best, reverse=True)]
        ranked = self._recut_all(sorted(ranked, key=self.rank))  # stable: of equal ones the first stays
        lacking = self._nearest if self._nearest is None or ranked else self.least_lacking(self._nearest)
        nearest = None if lacking is None else self.finished(lacking)
        if ranked and all(each.choice.spread.stages > 1 for each in ranked):
            ranked = sorted([*ranked, *self._whole(spreads, self.rank(ranked[0]))], key=self.rank)[:BEST]
        return Found(tuple(ranked), self._priced, len(spreads), bounded, nearest)

    def _whole(self, spreads: Iterable[Spread], below: float) -> list[Estimate]:
        """The best without stages that are `below` so many seconds. Of a pipeline the closed form may say too little,
        so that twelve of them were taken for faster."""
        before = self._priced
        self._begin(below)
        for spread in spreads:
            if spread.stages == 1 and self.bound(spread) < self._worst:
                self._price(spread)
        self._priced += before
        return [each for _, _, each in sorted(self._best, reverse=True)]

    def _recut_all(self, ranked: list[Estimate]) -> list[Estimate]:
        """The candidates with the best stages of those that are looked at; and choices that fit with no others, where
        they are of the fastest."""
        self.spent = 0
        others = [self.recut(each.choice) for each in ranked]
        best = [min(each, other or each, key=self.rank) for each, other in zip(ranked, others, strict=True)]
        short = [begun.choice for _, _, begun in sorted(self._short, reverse=True)]
        if self._nearest is not None and self._nearest.choice not in short:
            short.append(self._nearest.choice)
        best = sorted([*best, *filter(None, map(self.recut, short))], key=self.rank)[:BEST]
        if best and (stages := best[0].choice.stages) and not few(stages):
            self.spent = min(self.spent, ACTIONS // 2)
            best[0] = min(best[0], self.recut(best[0].choice, stages, FURTHER) or best[0], key=self.rank)
        return best

    def _reached(self, near: Iterable[Spread]) -> float:
        """Seconds that the candidates of a search are below: `BEST` choices of the degrees `near` take no longer.
        Infinite where fewer fit."""
        self._begin(math.inf)
        for spread in near:
            self._price(spread)
        return math.nextafter(self._worst, math.inf)

    def _price(self, spread: Spread) -> None:
        """Prices the choices of these degrees that may be candidates, and keeps the best."""
        for first in self.firsts(spread):
            if self._may_win(first):
                self._price_tiers(first)

    def _may_win(self, first: Choice) -> bool:
        """Whether choices like `first` may be candidates: what they compute, and what their stages take, is asked
        first."""
        if math.isinf(self._worst):
            return True
        products = self.products(first.spread, first.microbatch, first.compile)
        return self._ranked(first, products) < self._worst and self._ranked(first, self.least(first)) < self._worst

    def _price_tiers(self, first: Choice) -> None:
        enough, slow, hopes = set[Tier](), set[Tier](), cache(partial(self._hopes, first))
        for tier in self.tiers(first.spread):
            zero, shard, away, how = tier
            nearer = [(zero, shard, each, how) for each in self.nearer[away]] if away else []
            if any(each in enough for each in nearer):
                continue
            self._priced += 1
            if any(each in slow for each in nearer[1:]):  # what goes to a disk takes as long beside moves
                continue
            choice = with_tier(first, tier)
            if away is None and self._is_full(choice):
                continue
            may_be, has_room = hopes(away) if away else (True, True)
            if not may_be or self._is_slow(choice):
                slow.add(tier)
                continue
            if not has_room:
                continue
            begun = self.looked(choice)
            if (fits := self.fits(choice, begun.fullest)) and (away or self._at_ease(begun)):
                enough.add(tier)
            if not fits and (self._nearest is None or begun.fullest.bytes < self._nearest.fullest.bytes):
                self._nearest = begun
            self._keep(begun, fits)

    def _keep(self, begun: Begun, fits: bool) -> None:
        """Finishes a choice that fits, and keeps it where it is of the best. One that may be where more is computed
        again than must be is looked at later, when the best are known."""
        terms = begun.terms
        if (seconds := self._ranked(begun.choice, math.fsum(terms.values()))) >= self._worst:
            return
        if not fits and begun.lane.ranks > 1:
            keep = heapq.heappush if len(self._short) < BEST else heapq.heappushpop
            keep(self._short, (-seconds, -self._priced, begun))
        if fits:
            estimate = self.finished(begun)
            self._push(self._priced, estimate)
            terms = {**estimate.terms, "offload": 0.0, "optimizer": 0.0}  # at least, where nothing moves any more
            fits = not estimate.terms["offload"]
        least = self._ranked(begun.choice, math.fsum(terms.values()))
        if begun.choice.offload is not None and not fits and least < self._worst:
            self._later.append((least, self._priced, begun))

    def _push(self, number: int, estimate: Estimate) -> None:
        """Keeps an estimate where it is of the best, and faster than the one of the same number."""
        if (seconds := self.rank(estimate)) >= self._worst:
            return
        if same := next((each for each in self._best if each[1] == -number), None):
            if -same[0] <= seconds:
                return
            self._best.remove(same)
            heapq.heapify(self._best)
        heapq.heappush(self._best, (-seconds, -number, estimate))
        if len(self._best) > BEST:
            heapq.heappop(self._best)

    def _compute_more(self) -> None:
        """Looks at choices of which more is computed again than must be: weights and state may stay then, which moves
        less, and takes less of a host that has not room for all. Those of the best, and what may be the first of
        them."""
        kept = {-number for _, number, _ in self._best}
        for least, number, begun in sorted(self._later, key=lambda each: each[:2]):
            first = -max(self._best)[0] if self._best else math.inf
            if (number in kept or least < first) and self._fits_somehow(begun):
                for way in self.freer(begun):
                    if self._ranked(way.choice, math.fsum(way.terms.values())) >= self._worst:
                        break
                    if self.fits(way.choice, way.fullest):
                        self._push(number, self.finished(way))

    def _is_slow(self, choice: Choice) -> bool:
        """Whether a choice is slower than the candidates however its blocks are treated, and those that are left out
        where it fits are so too (see nearer): what it needs of memory is not asked then. What goes to the disk takes as
        long beside moves as what goes to the host."""
        if math.isinf(self._worst):
            return False
        choice = self._as_on_host(choice)
        seconds, again = self.floor(choice)
        if not again and choice.offload is None:
            return False
        if self._ranked(choice, seconds) >= self._worst:
            return True
        return choice.offload is not None and self._ranked(choice, self.timed(choice)) >= self._worst

    def _is_full(self, choice: Choice) -> bool:
        """Whether a rank has no room for what stands on its device whatever is computed again."""
        lane = self.lane(choice)
        ranks = () if math.isinf(self._worst) else (ranks[0] for ranks in lane.cuts.alike)
        return any(self._stands(choice, lane, rank).bytes > self.most(choice) for rank in ranks)

    def _hopes(self, first: Choice, away: Offload) -> tuple[bool, bool]:
        """Whether of the choices like `first` with so much elsewhere one may be fast enough with what its device has
        room for, and whether there is room on the host, as far as can be told before each is asked: of those that
        differ in how ranks share it, the one that all of them share needs least, and so computes least again."""
        if math.isinf(self._worst) or {"zero", "shard"} & set(self.task.pins):
            return True, True
        least = first._replace(zero=3 if first.spread.replicas > 1 else 0, offload=away)
        near = self._as_on_host(least)
        if self._is_slow(near) or self.looked(near).fullest.bytes > self.most(near):
            return False, False
        return True, self._fits_somehow(self.looked(least))

    @property
    def _worst(self) -> float:
        """Seconds that a candidate has to stay below."""
        return min(self._below, -self._best[0][0]) if len(self._best) == BEST else self._below


def search(task: Task) -> Found:
    """Finds the fastest plans. Raises UserError where no degrees are legal, NoRoom where nothing fits."""
    asked = Search(task)
    found = asked.run()
    if not found.spreads:
        raise NoDegrees(no_degrees(task))
    if found.nearest is None and not found.best:
        raise UserError(f"no plan with {plan_text(task.pins)}: {asked.why_none()}. Leave out one of these")
    if not found.best:
        assert found.nearest is not None
        near = found.nearest
        plan = plan_text(near.choice.plan(task.pins).to_dict())
        most, needs = asked.most(near.choice), near.bytes
        if asked.prices.slowest.on_host:  # one memory
            needs += near.on_host
        takes = f"at least {units.enough(needs)} of a rank, which may use {units.size(most)}"
        if needs <= most:
            has = units.size(asked.on_host(near.choice))
            takes = f"{units.enough(near.on_host)} of its host for a rank, where {has} are"
        plan = f"{plan} with microbatches of {near.choice.microbatch}"
        raise NoRoom(f"no plan fits: the one that needs least, {plan}, takes {takes}", more_room(task))
    return found

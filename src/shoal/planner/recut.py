"""Stages of a pipeline moved piece by piece: where its lists of actions wait less so, and where one stage
is short of memory and others have room. A search begins with the stages of which the slowest takes least (see cuts)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

from shoal.planner.estimates import Begun
from shoal.planner.judged import Judged
from shoal.planner.lanes import BUSY
from shoal.planner.pipes import actions
from shoal.planner.task import Choice, Estimate
from shoal.planner.timed import APART

Numbers = tuple[int, ...]
"""How many pieces each stage has."""
Value = tuple[float, float]
"""Bytes that a rank lacks, and seconds of a step: the less the better, in this order."""

LOOKED = 64
"""Cuts of a choice that are looked at: all, where there are no more, else those near the best so far."""
FURTHER = 512
"""And of the fastest choice."""
ACTIONS, EACH = 1_000_000, 1_000
"""Actions that are simulated for all of them, about; what a cut costs beside, in as many."""
WORST = (math.inf, math.inf)


class Recut(Judged):
    """The choices of a task, whose stages may be other ones than those that a search begins with. `spent`: of
    `ACTIONS`."""

    spent = 0

    def recut(self, choice: Choice, start: Numbers = (), looked: int = LOOKED) -> Estimate | None:
        """What `choice` takes with the best stages of as many as are `looked` at, from `start` on, by the lists of
        actions of its schedule; None where it fits with none of them, or its stages are given."""
        if choice.spread.stages == 1 or self.task.pins.get("stages") or self.spent >= ACTIONS:
            return None
        found = dict[Numbers, Estimate]()
        self._best_numbers(choice, start, looked, found)
        return min(found.values(), key=self.rank, default=None)

    def least_lacking(self, begun: Begun) -> Begun:
        """The choice with the stages that lack least memory of those that are looked at."""
        choice = begun.choice
        if choice.spread.stages == 1 or self.task.pins.get("stages"):
            return begun
        self.spent = 0
        numbers = self._best_numbers(choice, (), LOOKED, {})
        other = self.looked(choice._replace(recompute="none", stages=numbers, shares=()))
        return min(begun, other, key=lambda each: self.lacks(each.choice, each.fullest))

    def _best_numbers(self, choice: Choice, start: Numbers, looked: int, found: dict[Numbers, Estimate]) -> Numbers:
        """The best stages of those that are looked at; `found` gets what was simulated on the way."""
        free = choice._replace(recompute="none", stages=(), shares=())
        number = math.ceil(self.task.rows / choice.microbatch / choice.spread.copies)
        each = EACH + actions(choice.spread.stages, number, choice.chunks)

        def value(numbers: Numbers, least: Value) -> Value:
            asked, self.spent = free._replace(stages=numbers), self.spent + each
            limit = least[1] if least[0] == 0 else math.inf
            if self._ranked(asked, self._at_work(asked) if few(numbers) else self.least(asked)) >= limit:
                return WORST
            begun = self.looked(asked)
            seconds = math.fsum(begun.terms.values())
            if (lacks := self.lacks(asked, begun.fullest)) > 0:
                return lacks, seconds
            if not few(numbers) and self._ranked(asked, seconds) >= limit:
                return WORST
            found[numbers] = self.simulated(self.finished(begun))
            return 0.0, self.rank(found[numbers])

        return best_cut(start or self.cuts(free).numbers, value, min(looked, (ACTIONS - self.spent) // each))

    def _at_work(self, choice: Choice) -> float:
        """Seconds that no list of actions takes less than: what the rank that works longest does, where others wait for
        nobody and leave it the cores that they share."""
        lane = self.lane(choice)
        terms = self._in_lane(choice, lane, lane.none(), together=False)[0]
        busy = math.fsum(terms.get(what, 0.0) for what in BUSY) / self.crowd(choice.spread).most
        return busy + math.fsum(terms[what] for what in APART)


def best_cut(start: Numbers, value: Callable[[Numbers, Value], Value], most: int) -> Numbers:
    """The best cut of `most` that are looked at, from `start` on. `value`: of a cut, or anything that is more where it
    is above the best so far, which is given too."""
    best, least = start, value(start, WORST)
    looked, others = {start}, _all(sum(start), len(start)) if few(start) else _near(start)
    while (cut := next(others, None)) is not None and len(looked) < most:
        if cut not in looked:
            looked.add(cut)
            if (found := value(cut, least)) < least:
                best, least, others = cut, found, others if few(cut) else _near(cut)
    return best


def few(numbers: Numbers) -> bool:
    """Whether there are so few cuts into as many stages that all of them are looked at."""
    return math.comb(sum(numbers) - 1, len(numbers) - 1) <= LOOKED


def _all(pieces: int, stages: int) -> Iterator[Numbers]:
    for ends in combinations(range(1, pieces), stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *ends, pieces)))


def _near(numbers: Numbers) -> Iterator[Numbers]:
    """The cuts in which a stage has a piece less and another one more, those between as many: neighbours first."""
    number = len(numbers)
    for apart in range(1, number):
        for first in range(number - apart):
            for giver, taker in ((first, first + apart), (first + apart, first)):
                if numbers[giver] > 1:
                    moved = {giver: -1, taker: 1}
                    yield tuple(each + moved.get(stage, 0) for stage, each in enumerate(numbers))

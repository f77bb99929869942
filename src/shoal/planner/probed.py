"""How many times longer than counted a model takes where it was run for a moment (probe): by rows of a microbatch, and,
where ranks divide matrices, of what they divide and of what each of them does whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from shoal.planner.cluster import Device, between
from shoal.planner.computing import AS_COUNTED, FORWARD, UNADDED, Longer, Times, work_and_launches
from shoal.planner.degrees import Spread
from shoal.planner.profile import PartProfile
from shoal.planner.task import Task


class Factors(NamedTuple):
    """Factors of a forward, of a backward, and of what backward computes again: some operations of blocks, and all."""

    forward: Longer
    backward: Longer
    some: float
    full: float


class ByRows:
    """The factors of a task's model, on the device that others wait for."""

    def __init__(self, task: Task, slowest: Device) -> None:
        self._task, self._slowest = task, slowest
        self._apart = cache(self._find_apart)

    def of(self, own: Sequence[PartProfile], spread: Spread, rows: float) -> Factors:
        """Returns those of the parts `own` in a microbatch of `rows` rows, of which ranks that divide rows or tokens
        have a share each."""
        if not self._task.probed:
            return Factors(AS_COUNTED, AS_COUNTED, 1.0, 1.0)
        whole, rowwise = math.fsum(part.products.value for part in own), spread._replace(parts=1)
        share = math.fsum(part.products.on(rowwise) for part in own) / whole if whole else 1.0
        forward, backward, some, full = (self._at(place, share * rows) for place in range(1, 5))
        if spread.parts == 1:
            return Factors(Longer(forward, forward), Longer(backward, backward), some, full)
        apart = self._apart(FORWARD, 1, share * rows), self._apart(UNADDED, 2, share * rows)
        return Factors(*apart, some, full)

    def _at(self, place: int, rows: float) -> float:
        return between([(each[0], each[place]) for each in self._task.probed], rows)

    def _find_apart(self, times: Times, place: int, rows: float) -> Longer:
        """What ranks divide takes a share of its time, and Python does not: the launches take what the line through the
        two smallest numbers of rows that are known has at none, between what is counted and what they take where each
        comes once; the work is the rest."""
        work, launches = self._counted(times, rows)
        seconds = self._at(place, rows) * (work + launches)
        if len(self._task.probed) == 1 or not work or not launches:
            return Longer(self._at(place, rows), self._at(place, rows))
        (less, some), (more, others) = (
            (each.rows, each[place] * sum(self._counted(times, each.rows))) for each in self._task.probed[:2]
        )
        at_none = (more * some - less * others) / (more - less)
        once = min(max(launches, at_none), self._slowest.cold * launches, seconds)
        return Longer((seconds - once) / work, once / launches)

    def _counted(self, times: Times, rows: float) -> tuple[float, float]:
        """Seconds of work and of launches of the whole model."""
        how = self._slowest, self._task.numbers, False
        both = [work_and_launches(part, Spread(), rows, times, *how) for part in self._task.profile.parts]
        return math.fsum(work for work, _ in both), math.fsum(launches for _, launches in both)

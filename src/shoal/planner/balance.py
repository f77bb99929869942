"""Pieces in a row cut into stages, such that the slowest takes as little as can be."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

EVEN = 1.005
"""How much more than the mean the slowest rank may take where no better cut is looked for."""


def cut(costs: Sequence[float], speeds: Sequence[float], places: Sequence[Sequence[int]]) -> list[int]:
    """How many of the pieces with these costs each stage has, at least one, so that the slowest rank takes as little as
    can be, exactly where each has one stage. Of several the slowest stage takes as little as can be, or ranks take less
    with turns, of a stage of each rank, that are cut apart. `speeds`: of the ranks' devices, relative to each other;
    `places`: the stages of each rank."""
    of_stages = dict(sorted((stage, speed) for own, speed in zip(places, speeds, strict=True) for stage in own))
    each, ranks = list(of_stages.values()), len(speeds)
    whole = _cut(costs, each)
    if len(each) == ranks or _slowest(costs, speeds, places, whole) <= EVEN * sum(costs) / sum(speeds):
        return whole
    turns = enumerate(_turns(costs, ranks, len(each) // ranks))
    apart = [number for turn, own in turns for number in _cut(own, each[turn * ranks : (turn + 1) * ranks])]
    return min(whole, apart, key=lambda numbers: _slowest(costs, speeds, places, numbers))


def _cut(costs: Sequence[float], speeds: Sequence[float]) -> list[int]:
    before = [0.0, *accumulate(costs)]
    if len(set(speeds)) > 1:
        return _best_of_all(np.array(before), speeds)
    return _by_bisection(before, len(speeds))


def _turns(costs: Sequence[float], ranks: int, turns: int) -> list[Sequence[float]]:
    """The pieces in turns, in which each rank has as many, as far as that comes out even, the first turns more."""
    each, left = divmod(len(costs), ranks)
    numbers = [ranks * (each // turns + (turn < each % turns)) for turn in range(turns)]
    numbers[each % turns] += left
    return [costs[start:end] for start, end in pairwise(accumulate(numbers, initial=0))]


def _slowest(
    costs: Sequence[float], speeds: Sequence[float], places: Sequence[Sequence[int]], numbers: Sequence[int]
) -> float:
    """What the slowest rank takes."""
    stages = [sum(costs[start:end]) for start, end in pairwise(accumulate(numbers, initial=0))]
    return max(sum(stages[stage] for stage in own) / speed for own, speed in zip(places, speeds, strict=True))


def _by_bisection(before: Sequence[float], stages: int) -> list[int]:
    """Finds the least bound by bisection, of devices that are alike: it holds if stages that take as much as they may
    reach the end."""
    low = before[-1] / stages
    ends, high = _filled(before, stages, low + max(after - each for each, after in pairwise(before)))
    bound = low
    while low < high * (1 - 1e-9):
        found, limit = _filled(before, stages, bound)
        if found and limit >= high:  # but for rounding the same
            break
        if found:
            ends, high = found, limit
        else:
            low = limit
        bound = (low + high) / 2
    return _evened(before, ends, high)


def _filled(before: Sequence[float], stages: int, bound: float) -> tuple[list[int], float]:
    """Fills stages up to `bound` from the first one. Returns their ends, and what the slowest takes; or nothing, where
    the last piece is not reached, and the least bound by which a stage has more."""
    ends, last, most, more = [0], len(before) - 1, 0.0, math.inf
    for left in range(stages - 1, -1, -1):
        start = ends[-1]
        begin = before[start]
        end = min(bisect_right(before, begin + bound * (1 + 1e-9), start) - 1, last - left)
        if end < last - left:
            more = min(more, before[end + 1] - begin)
        if end == start:
            return [], more
        most = max(most, before[end] - begin)
        ends.append(end)
    return (ends, most) if ends[-1] == last else ([], more)


def _evened(before: Sequence[float], ends: Sequence[int], bound: float) -> list[int]:
    """Returns one of the cuts whose stages take up to `bound`: they are as even as can be from the last one on, and
    where they cannot be even the first ones have more. `ends`: as far as stages may reach."""
    numbers, stop = [], len(before) - 1
    for stage in range(len(ends) - 2, 0, -1):
        least = bisect_left(before, before[stop] - bound * (1 + 1e-9), 0, stop)
        even = bisect_left(before, before[stop] * (stage / (stage + 1)) * (1 - 1e-9), 0, stop)
        start = min(max(least, even, stage), ends[stage], stop - 1)
        numbers.append(stop - start)
        stop = start
    return [stop, *reversed(numbers)]


def _best_of_all(before: NDArray[np.float64], speeds: Sequence[float]) -> list[int]:
    """Finds for each stage, and each piece that it may end with, the best of all that it may begin with, as devices
    that differ need."""
    own = before[None, :] - before[:, None]  # from, to
    own[np.tri(len(before), dtype=bool)] = np.inf
    slowest = np.where(np.arange(len(before)) == 0, 0.0, np.inf)
    begins = []
    for speed in speeds:
        each = np.maximum(slowest[:, None], own / speed)
        begins.append(each.argmin(axis=0))
        slowest = each.min(axis=0)
    ends = [len(before) - 1]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return [end - begin for end, begin in pairwise(ends)][::-1]

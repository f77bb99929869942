"""Stages of a model, cut so that the slowest is as fast as possible, and what their schedule does: the share of a step
that ranks wait, from the real lists of actions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from shoal.pipeline import Costs, Schedule, kept, make_schedule, simulate
from shoal.pipeline.actions import Kind

LARGE = 4000
"""Actions of a schedule up to which it is simulated whole; beyond, what more microbatches take is extrapolated."""


def cut(costs: Sequence[float], stages: int, speeds: Sequence[float] | None = None) -> list[int]:
    """How many of the pieces with these costs each stage has, at least one, so that the slowest takes as little as can
    be. `speeds`: of the stages' devices, relative to each other. Exact: the least bound is found by bisection, and a
    bound holds if stages that take as much as they may reach the end."""
    speeds = speeds or [1.0] * stages
    before = [0.0, *accumulate(costs)]
    low, high = before[-1] / sum(speeds), before[-1] / min(speeds)
    best = _filled(before, stages, speeds, high)
    for _ in range(40):
        middle = (low + high) / 2
        found = _filled(before, stages, speeds, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
        if high - low <= 1e-6 * high:
            break
    assert best is not None  # all that is left fits the last stage
    return best


def _filled(before: Sequence[float], stages: int, speeds: Sequence[float], bound: float) -> list[int] | None:
    """Fills stages up to `bound` from the last one: the first, which keeps most microbatches, has what is left over."""
    found, stop = [0] * stages, len(before) - 1
    for stage in range(stages - 1, -1, -1):
        least = before[stop] - bound * speeds[stage] * (1 + 1e-9)
        start = max(bisect_left(before, least, 0, stop), stage)
        if start >= stop:
            return None
        found[stage], stop = stop - start, start
    return None if stop else found


@lru_cache(maxsize=4096)
def schedule_named(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """The schedule, made once."""
    return make_schedule(name, ranks, microbatches, chunks)


@lru_cache(maxsize=4096)
def under_way(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """For each rank the most microbatches of each of its stages that wait for their backward together. Of many
    microbatches a few are enough: the schedule repeats itself."""
    schedule = schedule_named(name, ranks, min(microbatches, 3 * ranks), chunks)
    found = []
    for rank, order in enumerate(schedule.orders):
        own = schedule.stages_of(rank)
        most = max((dict(now) for now in kept(order)), key=lambda now: sum(now.values()))
        found.append(tuple(most.get(stage, 0) for stage in own))
    return tuple(found)


def fill(name: str, ranks: int, chunks: int, forward: float, backward: float) -> float:
    """Seconds in which ranks wait, of stages that take alike: `forward` and `backward` of all chunks of a rank."""
    if name == "zb1p":  # the weights' half of backward, about a half, fills what would be waiting
        return (ranks - 1) * forward
    return (ranks - 1) * (forward + backward) / chunks


def simulated(
    name: str, ranks: int, microbatches: int, chunks: int, stages: Sequence[tuple[float, float]], message: float
) -> float:
    """Seconds of a step by event simulation of the schedule's own lists of actions. `stages`: seconds of forward and
    backward of each."""
    most = max(2, LARGE // (2 * ranks * chunks))
    few, more = max(ranks, most // 2), max(2 * ranks, most)
    if microbatches <= more:
        return _run(name, ranks, microbatches, chunks, stages, message)
    few -= few % ranks
    more -= more % ranks  # interleaved runs groups of as many microbatches as ranks
    first, second = (_run(name, ranks, number, chunks, stages, message) for number in (few, more))
    return second + (second - first) * (microbatches - more) / (more - few)


def _run(
    name: str, ranks: int, microbatches: int, chunks: int, stages: Sequence[tuple[float, float]], message: float
) -> float:
    return simulate(schedule_named(name, ranks, microbatches, chunks), costs_of(stages, message)).seconds


def costs_of(stages: Sequence[tuple[float, float]], message: float) -> Costs:
    """What the actions of a schedule take: `stages`, seconds of forward and backward of each; either half of a backward
    takes half of it."""
    seconds: dict[tuple[Kind, int], float] = {}
    for stage, (forward, backward) in enumerate(stages):
        seconds[("F", stage)], seconds[("B", stage)] = forward, backward
        seconds[("I", stage)] = seconds[("W", stage)] = backward / 2
    return Costs(seconds, message)

"""Which blocks of a model make up which stage: contiguous, so that the slowest stage is as fast as it can be, within the memory of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from shoal.errors import UserError


def balance(
    costs: Sequence[float],
    stages: int,
    first: float = 0.0,
    last: float = 0.0,
    sizes: Sequence[float] | None = None,
    kept: Sequence[float] | None = None,
    under_way: Sequence[int] | None = None,
    limit: float = math.inf,
) -> list[range]:
    """The blocks of each of `stages`, at least one each. `costs`: seconds of each block, forward and backward; `first` and `last`: what the first stage has before its blocks
    (embeddings) and the last one behind them (the head and the loss). `sizes`: bytes that each block takes, `kept`: those that it keeps for each microbatch between forward and backward, of which a stage has as many as
    `under_way` says; a stage may have `limit` of both together.

    The largest stage is as small as possible; ties go to more even stages. UserError where there are too few blocks, or none fit.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise UserError(f"a model of {blocks} blocks cannot be cut into {stages} stages: take at most {blocks}")
    none = (0.0,) * blocks
    before, bytes_before, kept_before = ([0.0, *accumulate(each)] for each in (costs, sizes or none, kept or none))
    under_way = under_way or (1,) * stages

    def cost(stage: int, start: int, stop: int) -> tuple[float, float]:
        """The most and the squares of one stage."""
        if bytes_before[stop] - bytes_before[start] + under_way[stage] * (kept_before[stop] - kept_before[start]) > limit:
            return math.inf, math.inf
        seconds = before[stop] - before[start] + first * (stage == 0) + last * (stage == stages - 1)
        return seconds, seconds**2

    best: list[tuple[float, float, list[int]]] = [(*cost(0, 0, stop), [stop]) for stop in range(blocks + 1)]
    for stage in range(1, stages):
        following: list[tuple[float, float, list[int]]] = []
        for stop in range(blocks + 1):
            found: tuple[float, float, list[int]] = (math.inf, math.inf, [])
            for start in range(stage, stop):
                most, squares, cuts = best[start]
                here = cost(stage, start, stop)
                found = min(found, (max(most, here[0]), squares + here[1], [*cuts, stop]))
            following.append(found)
        best = following
    most, _, cuts = best[blocks]
    if math.isinf(most):
        raise UserError(
            f"no cut into {stages} stages leaves each within {limit / 2**20:,.0f} MiB: take more stages, or recompute"
        )
    return [range(start, stop) for start, stop in zip([0, *cuts], cuts, strict=False)]

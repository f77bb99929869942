"""Assigns contiguous blocks of a model to stages, so that the slowest stage is as fast as possible within the memory of
each."""

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
    """Returns the blocks of each stage, at least one each.

    costs: seconds of each block, forward and backward
    stages: their number
    first: seconds of what the first stage has before its blocks (embeddings)
    last: seconds of what the last stage has behind them (the head and the loss)
    sizes: bytes of each block
    kept: bytes that each block keeps for a microbatch between forward and backward
    under_way: the number of such microbatches on each stage
    limit: bytes of `sizes` and `kept` together that a stage may have

    The largest stage is as small as possible; ties go to more even stages. Raises UserError if there are too few
    blocks, or no cut fits.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise UserError(f"a model of {blocks} blocks cannot be cut into {stages} stages: take at most {blocks}")
    none = (0.0,) * blocks
    before, bytes_before, kept_before = ([0.0, *accumulate(each)] for each in (costs, sizes or none, kept or none))
    under_way = under_way or (1,) * stages

    def cost(stage: int, start: int, stop: int) -> tuple[float, float]:
        """Returns the seconds of one stage and their square; infinity if it exceeds the limit."""
        if (
            bytes_before[stop] - bytes_before[start] + under_way[stage] * (kept_before[stop] - kept_before[start])
            > limit
        ):
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

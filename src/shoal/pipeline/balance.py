"""Assigns contiguous blocks of a model to stages, so that the slowest stage is as fast as possible within the memory of
each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UserError
from shoal.units import size


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

    The largest stage is as small as possible; ties go to more even stages, then to earlier cuts. Raises UserError if
    there are too few blocks, or no cut fits.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise UserError(f"plan.pp: a model of {blocks} blocks has no {stages} stages: take at most {blocks}")
    none = (0.0,) * blocks
    before, bytes_before, kept_before = (
        np.array([0.0, *accumulate(each)]) for each in (costs, sizes or none, kept or none)
    )
    under_way = under_way or (1,) * stages

    def cost(stage: int, starts: slice, stop: int) -> NDArray[np.float64]:
        """Returns the seconds of a stage that ends at block `stop`, by its first block; infinity beyond the limit."""
        held = bytes_before[stop] - bytes_before[starts] + under_way[stage] * (kept_before[stop] - kept_before[starts])
        seconds = before[stop] - before[starts] + first * (stage == 0) + last * (stage == stages - 1)
        return np.where(held > limit, math.inf, seconds)

    most = np.concatenate([cost(0, slice(0, 1), stop) for stop in range(blocks + 1)])
    squares, order, came_from = most**2, np.arange(blocks + 1), list[NDArray[np.int64]]()
    for stage in range(1, stages):
        (slowest, sums), previous = np.full((2, blocks + 1), math.inf), np.zeros(blocks + 1, dtype=np.int64)
        for stop in range(stage + 1, blocks + 1):
            starts = slice(stage, stop)
            largest, even = np.maximum(most[starts], here := cost(stage, starts, stop)), squares[starts] + here**2
            chosen = _least(largest, even, order[starts])
            slowest[stop], sums[stop], previous[stop] = largest[chosen], even[chosen], stage + chosen
        came_from.append(previous)
        # of two ways to a block the one with the earlier cuts comes first
        order = np.argsort(np.lexsort((np.arange(blocks + 1), order[previous])))
        most, squares = slowest, sums
    if math.isinf(most[blocks]):
        raise UserError(f"no cut into {stages} stages leaves each within {size(limit)}: take more stages, or recompute")
    cuts = [blocks]
    for previous in reversed(came_from):
        cuts.append(int(previous[cuts[-1]]))
    return [range(start, stop) for start, stop in zip([0, *reversed(cuts[1:])], reversed(cuts), strict=True)]


def _least(*columns: NDArray[Any]) -> int:
    """Returns the place of the least row, by the first column, then by the next ones."""
    places = np.arange(len(columns[0]))
    for column in columns:
        places = places[column[places] == column[places].min()]
    return int(places[0])

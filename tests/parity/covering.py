"""Few rows of a table that cover it: these run in every suite, the others in `make matrix`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from typing import Any

import pytest


def thinned(rows: Sequence[tuple[Any, ...]], covering: Collection[tuple[Any, ...]]) -> list[Any]:
    """The rows as parameters of a test; those beyond `covering` are for the matrix."""
    assert set(covering) <= set(rows)
    return [
        pytest.param(*row, id="-".join(map(str, row)), marks=[] if row in covering else [pytest.mark.matrix])
        for row in rows
    ]


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each of `first` with one of `second`, which take turns."""
    return [(one, second[place % len(second)]) for place, one in enumerate(first)]


def pairwise(
    rows: list[tuple[Any, ...]], needed: Callable[[tuple[int, Any, int, Any]], bool] = lambda pair: True
) -> list[tuple[Any, ...]]:
    """A pairwise covering array: every pair (column, value, column, value) that is `needed` and stands together in any
    row does so at least once. Chosen greedily (most new pairs first, ties in their order)."""
    left = {pair for row in rows for pair in _pairs(row) if needed(pair)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(left & _pairs(row)))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def _pairs(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}

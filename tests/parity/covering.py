"""A pairwise covering array: few rows in which every pair of values that stands together in any row does so at least once."""

from __future__ import annotations

from itertools import combinations
from typing import Any


def pairwise(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Some of `rows`, chosen greedily (most new pairs first, ties in their order)."""
    left = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(left & _pairs(row)))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def _pairs(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}

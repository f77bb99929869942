"""A pairwise covering array: few rows in which every pair of values of two columns stands together at least once."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any


def pairwise(*columns: list[Any]) -> list[tuple[Any, ...]]:
    """Rows of the product of `columns`, chosen greedily (most new pairs first, ties in product order)."""
    rows = list(product(*columns))
    left = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while left:
        best = max(rows, key=lambda row: len(left & _pairs(row)))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


def _pairs(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}

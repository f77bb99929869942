"""Which blocks of a rank are computed again in backward: as little time as can be for the bytes that have to be freed,
exactly: a knapsack with a choice for each block, where blocks that are alike are counted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = tuple[tuple[int, ...], ...]
"""For each kind of blocks how many of them are treated in each way."""


class Kind(NamedTuple):
    """`number` blocks that are alike: for each way to treat one, the bytes that it `frees` and the seconds that it
    `costs`."""

    number: int
    frees: tuple[float, ...]
    costs: tuple[float, ...]

    def without(self, one: bool) -> Kind:
        """Returns these blocks, or all but `one` of them."""
        return Kind(self.number - 1, self.frees, self.costs) if one else self


@dataclass(frozen=True)
class Front:
    """The choices of which no other one frees as much in less time, by the bytes that they free."""

    frees: list[float]
    costs: list[float]
    counts: NDArray[np.int32]
    ways: int

    def cheapest(self, need: float) -> tuple[float, int] | None:
        """The seconds of the cheapest choice that frees `need` bytes, and its place; None where none does."""
        place = bisect_left(self.frees, need * (1 - 1e-12) if need > 0 else need)
        return None if place == len(self.frees) else (self.costs[place], place)

    @cached_property
    def at(self) -> Callable[[int], Counts]:
        """The choice at a place of the front."""
        return cache(self._at)

    def _at(self, place: int) -> Counts:
        row = [int(each) for each in self.counts[place]]
        return tuple(tuple(row[start : start + self.ways]) for start in range(0, len(row), self.ways))


@lru_cache(maxsize=1 << 14)
def front(kinds: tuple[Kind, ...], ways: int) -> Front:
    """All choices for blocks of `kinds`, each of which has as many `ways`."""
    if not kinds:
        return Front([0.0], [0.0], np.zeros((1, 0), np.int32), ways)
    (frees, costs, counts), *others = (_alone(kind, ways) for kind in kinds)
    for more, dearer, one in others:
        frees, costs = np.add.outer(frees, more).ravel(), np.add.outer(costs, dearer).ravel()
        keep = _best(frees, costs)
        frees, costs = frees[keep], costs[keep]
        counts = np.concatenate([counts[keep // len(one)], one[keep % len(one)]], axis=1)
    return Front(frees.tolist(), costs.tolist(), counts, ways)


def _alone(kind: Kind, ways: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]]:
    """The front of the blocks of one kind: bytes, seconds, counts."""
    counts = _numbers(kind.number, ways)
    frees, costs = counts @ np.array(kind.frees), counts @ np.array(kind.costs)
    keep = _best(frees, costs)
    return frees[keep], costs[keep], counts[keep]


@lru_cache(maxsize=1024)
def _numbers(number: int, ways: int) -> NDArray[np.int32]:
    """All ways to split so many blocks, by how many have each way."""
    found: list[Sequence[int]] = [
        (number - sum(rest), *rest) for rest in product(range(number + 1), repeat=ways - 1) if sum(rest) <= number
    ]
    return np.array(found, np.int32)


def _best(frees: NDArray[Any], costs: NDArray[Any]) -> NDArray[np.intp]:
    """Places of those that no other one beats, by what they free."""
    order = np.lexsort((-frees, costs))
    ahead = np.maximum.accumulate(frees[order])
    first = np.ones(len(order), bool)
    first[1:] = ahead[1:] > ahead[:-1]
    return order[first]

"""The samples of the global batch of a step: a pure function of (seed, step), with nothing to save or replay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .keyed import derive_key, keyed_hash

ROUNDS = 4
"""Rounds of the Feistel network: the usual lower bound for a pseudo-random permutation (Luby, Rackoff 1988)."""


class GlobalBatches:
    """Base of orders of a dataset: epochs of `samples`, steps of `global_batch`, the last batch of an epoch short."""

    samples: int
    global_batch: int
    seed: int

    @property
    def kind(self) -> str:
        """Tells orders of as many samples, of the same batch and seed, from each other."""
        return type(self).__name__

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.samples / self.global_batch)

    def epoch(self, step: int) -> int:
        """Returns the epoch of `step`, from 0."""
        return step // self.steps_per_epoch

    def place(self, step: int) -> tuple[int, int]:
        """Returns the epoch of `step`, and its index in that epoch."""
        if step < 0:
            raise UserError(f"step is {step}: steps count from 0")
        return divmod(step, self.steps_per_epoch)


@dataclass(frozen=True)
class Cursor(GlobalBatches):
    """The random order of a map-style dataset of `samples` items, in global batches of `global_batch`.

    Every sample comes once per epoch, each epoch in another order; the last batch of an epoch is short where
    `global_batch` does not divide `samples`. Steps count from 0 and continue over epochs.
    """

    samples: int
    global_batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError("the dataset has no samples: there is nothing to train on. Check its source and its split")
        if self.global_batch < 1:
            raise UserError(f"global_batch is {self.global_batch}: give the number of samples in one step, at least 1")

    def ids(self, step: int) -> NDArray[np.int64]:
        """Returns the sample ids of the global batch of `step`, in order. Time and memory are O(global_batch)."""
        epoch, step_in_epoch = self.place(step)
        first = step_in_epoch * self.global_batch
        positions = np.arange(first, min(first + self.global_batch, self.samples), dtype=np.uint64)
        return permute(positions, self.samples, ("cursor", self.seed, epoch)).astype(np.int64)


def share_start(number: int, rank: int, ranks: int) -> int:
    """Returns where the share of `rank` begins of `number` things: the first ranks have one more where they do not come
    out even."""
    each, more = divmod(number, ranks)
    return rank * each + min(rank, more)


@lru_cache(maxsize=1024)
def share_starts(number: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """Returns where each rank's share begins of `number` things, and their end, where ranks take them in the ratio of
    `shares` (not all 0): such that the rank which has most for its share has as little as can be, exactly. Of equal
    ones the first have more, as by `share_start`."""
    if len(set(shares)) == 1:
        return tuple(share_start(number, rank, len(shares)) for rank in range(len(shares) + 1))
    weights = [Fraction(share) for share in shares]
    each = [int(number * weight / sum(weights)) for weight in weights]  # in none of the best has a rank less
    pairs = enumerate(zip(each, weights, strict=True))
    waiting = [((have + 1) / weight, rank) for rank, (have, weight) in pairs if weight]
    heapify(waiting)
    for _ in range(number - sum(each)):
        _, rank = waiting[0]
        each[rank] += 1
        heapreplace(waiting, ((each[rank] + 1) / weights[rank], rank))
    return (0, *accumulate(each))


def in_shares(number: int, shares: tuple[float, ...]) -> list[int]:
    """Returns how many of `number` things each rank has (see `share_starts`)."""
    return [end - start for start, end in pairwise(share_starts(number, shares))]


def permute(positions: NDArray[np.uint64], size: int, key: tuple[int | str, ...]) -> NDArray[np.uint64]:
    """Returns the images of `positions` (all below `size`) under a keyed pseudo-random permutation of range(size).

    The permutation is a Feistel network over Z_rows x Z_columns, the smallest near-square grid of at least `size`
    cells. An image in one of the fewer than `rows` surplus cells is permuted again until it is below `size` ("cycle
    walking"), which keeps it a permutation (Black, Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    rows = math.isqrt(size - 1) + 1
    columns = math.ceil(size / rows)
    round_keys = [(derive_key(*key, "row", r), derive_key(*key, "column", r)) for r in range(ROUNDS)]
    images = _feistel(positions, rows, columns, round_keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], rows, columns, round_keys)
    return images


def _feistel(
    cells: NDArray[np.uint64], rows: int, columns: int, round_keys: list[tuple[int, int]]
) -> NDArray[np.uint64]:
    """Applies the network, a bijection of range(rows * columns), since each half-round only adds to one coordinate."""
    row, column = np.divmod(cells, np.uint64(columns))
    for row_key, column_key in round_keys:
        row = (row + keyed_hash(column, row_key) % np.uint64(rows)) % np.uint64(rows)
        column = (column + keyed_hash(row, column_key) % np.uint64(columns)) % np.uint64(columns)
    return row * np.uint64(columns) + column

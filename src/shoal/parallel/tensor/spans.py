"""Computes which rows of a matrix a rank of a tensor-parallel group keeps; plain numbers.

    even(61, 4)                       0..15 | 16..30 | 31..45 | 46..60
    heads(4, size=8, ranks=2)         heads 0, 1 | heads 2, 3
    heads(2, size=8, ranks=4)         half of head 0 | its other half | half of head 1 | its other half:
                                      two ranks share a head

Ranks that share a head keep some of its rows each, so that no parameter is stored twice; they exchange the outputs of
these rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import UserError


@dataclass(frozen=True)
class Span:
    """The rows [start, stop) of the whole matrix.

    `sharers`: the number of neighbouring ranks that exchange the outputs of their rows; 1: this rank alone.
    """

    start: int
    stop: int
    sharers: int = 1

    @property
    def length(self) -> int:
        return self.stop - self.start

    def after(self, offset: int) -> Span:
        """Returns these rows of a matrix that begins `offset` rows later."""
        return Span(self.start + offset, self.stop + offset, self.sharers)


def even(whole: int, ranks: int, rank: int, what: str = "a dim") -> Span:
    """Returns the rows of `rank` where `whole` rows are cut evenly; the first ranks have one more if there is a
    remainder.

    Raises UserError, naming `what`, if some rank would have none.
    """
    if whole < ranks:
        raise UserError(f"{what} of {whole} cannot be cut among tp = {ranks} ranks: take tp = {whole} or less")
    start = rank * (whole // ranks) + min(rank, whole % ranks)
    return Span(start, start + length(whole, ranks, rank))


def length(whole: int, ranks: int, rank: int) -> int:
    """Returns the number of rows of `rank` where `whole` rows are cut evenly."""
    return whole // ranks + (rank < whole % ranks)


def heads(number: int, size: int, ranks: int, rank: int, what: str = "attention") -> Span:
    """Returns the rows of the heads of `rank`, of `number` heads with `size` rows each.

    Raises UserError, naming `what`, if neither the ranks divide the heads nor the heads the ranks.
    """
    if number % ranks == 0:
        return Span(rank * number // ranks * size, (rank + 1) * number // ranks * size)
    sharers = ranks // number
    if ranks % number or size % sharers:
        raise UserError(
            f"{what} has {number} heads of {size} rows, which tp = {ranks} ranks cannot share: take a tp that divides "
            "the number of heads or is a multiple of it"
        )
    first = rank // sharers * size
    part = even(size, sharers, rank % sharers)
    return Span(first + part.start, first + part.stop, sharers)

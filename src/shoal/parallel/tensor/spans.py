"""Which rows of a matrix a rank of a tensor-parallel group keeps: plain numbers.

    even(61, 4)                       0..15 | 16..30 | 31..45 | 46..60
    heads(4, size=8, ranks=2)         heads 0, 1 | heads 2, 3
    heads(2, size=8, ranks=4)         half of head 0 | its other half | half of head 1 | its other half: two ranks share a head

Of a head that ranks share each keeps some rows, so that no parameter is there twice; they hand each other what those rows give.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import UserError


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of the whole. `sharers`: how many neighbouring ranks need what they give together; 1: this rank alone."""

    start: int
    stop: int
    sharers: int = 1

    @property
    def length(self) -> int:
        return self.stop - self.start

    def after(self, offset: int) -> Span:
        """The same where the whole begins `offset` rows later."""
        return Span(self.start + offset, self.stop + offset, self.sharers)


def even(whole: int, ranks: int, rank: int, what: str = "a dim") -> Span:
    """Of `whole` rows as many for each rank as for any other, or one more for the first ones. UserError if some would have none."""
    if whole < ranks:
        raise UserError(f"{what} of {whole} cannot be cut among tp = {ranks} ranks: take tp = {whole} or less")
    start = rank * (whole // ranks) + min(rank, whole % ranks)
    return Span(start, start + length(whole, ranks, rank))


def length(whole: int, ranks: int, rank: int) -> int:
    """How many of `whole` a rank has: as many as any other, or one more if it is one of the first."""
    return whole // ranks + (rank < whole % ranks)


def heads(number: int, size: int, ranks: int, rank: int, what: str = "attention") -> Span:
    """The rows of the heads of `rank`, of `number` heads with `size` rows each. UserError where that does not come out even."""
    if number % ranks == 0:
        return Span(rank * number // ranks * size, (rank + 1) * number // ranks * size)
    sharers = ranks // number
    if ranks % number or size % sharers:
        raise UserError(
            f"{what} has {number} heads of {size} rows, which tp = {ranks} ranks cannot share: take a tp that divides the number of heads or "
            "is a multiple of it"
        )
    first = rank // sharers * size
    part = even(size, sharers, rank % sharers)
    return Span(first + part.start, first + part.stop, sharers)

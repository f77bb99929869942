"""A rank's part of one dim of a tensor that every rank would have whole; plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A rank's part of a dim that is a product (outer, whole, inner) of which `whole` is cut.

    dim: from the first one, or below 0 from the last
    inner: None where nothing is outside, and the rest of the dim is inside
    """

    dim: int
    whole: int
    inner: int | None

    def runs(self, part: Tensor, elements: int, rank: int, ranks: int) -> tuple[int, int, int]:
        """Returns where the `elements` of a sample in `part` stand among those of the whole tensor: (the first one, how
        many are adjacent, how far apart such runs begin)."""
        dim = self.dim % part.dim()
        inner = (self.inner or part.shape[dim] * ranks // self.whole) * prod(part.shape[dim + 1 :])
        run = self.whole // ranks * inner
        return rank * run, min(run, elements), self.whole * inner

    def of(self, x: Tensor, rank: int, ranks: int) -> Tensor:
        """Returns the part of the whole `x`."""
        shape = (self.whole, -1) if self.inner is None else (-1, self.whole, self.inner)
        dim = self.dim % x.dim()
        at = dim + (self.inner is not None)
        own = x.unflatten(dim, shape).narrow(at, rank * (self.whole // ranks), self.whole // ranks)
        return own.flatten(dim, dim + len(shape) - 1)

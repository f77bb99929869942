"""The distribution of a tensor's elements over the axes of a mesh.

    Placement.of(2, {0: "dp tp"})             dim 0 is cut along dp, each piece again along tp
    Placement.of(2, {1: "tp"}, partial="cp")  dim 1 is cut along tp; the ranks along cp hold summands of the values

Along any other axis the ranks hold the same. A dim is cut as `torch.chunk` does: even pieces, the last ones shorter or
empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.parallel.layout import Box


@dataclass(frozen=True)
class Placement:
    """The distribution of a tensor.

    dims: for each dim of the tensor the axes that cut it, outermost first
    partial: the axes along which ranks hold summands
    """

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        named = [*(axis for axes in self.dims for axis in axes), *self.partial]
        if len(named) != len(set(named)):
            raise ValueError(f"{self}: an axis is named twice")

    @classmethod
    def of(cls, ndim: int, cuts: Mapping[int, str] | None = None, partial: str = "") -> Placement:
        """Makes the placement of a tensor with `ndim` dims.

        `cuts[dim]` and `partial` name axes, separated by spaces. A negative dim counts from the end.
        """
        by_dim = {dim % ndim: tuple(axes.split()) for dim, axes in (cuts or {}).items()}
        return cls(tuple(by_dim.get(dim, ()) for dim in range(ndim)), frozenset(partial.split()))

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which ranks hold different values."""
        return self.partial.union(*self.dims)

    def cut(self, dim: int, axis: str) -> Placement:
        """Returns this placement with `dim` cut once more, by `axis`, innermost."""
        return replace(self, dims=(*self.dims[:dim], (*self.dims[dim], axis), *self.dims[dim + 1 :]))

    def joined(self, dim: int) -> Placement:
        """Returns this placement without the innermost cut of `dim`."""
        return replace(self, dims=(*self.dims[:dim], self.dims[dim][:-1], *self.dims[dim + 1 :]))

    def summed(self, axes: frozenset[str]) -> Placement:
        """Returns this placement after the summands along `axes` have been added up."""
        return replace(self, partial=self.partial - axes)

    def summands(self, axes: frozenset[str]) -> Placement:
        """Returns this placement with summands along `axes` too."""
        return replace(self, partial=self.partial | axes)

    def dual(self, summed: frozenset[str] = frozenset()) -> Placement:
        """Returns the placement of the gradient of a tensor that lies so.

        Each summand has the gradient of the sum. Along the axes `summed` the ranks hold the same but use it
        differently, so the gradients there are summands.
        """
        return Placement(self.dims, summed - self.axes)

    def box(self, shape: tuple[int, ...], sizes: Mapping[str, int], at: Mapping[str, int]) -> Box:
        """Returns the box of the global tensor that one rank holds.

        shape: of the global tensor
        sizes: number of ranks along each axis
        at: the rank's coordinate along each axis
        """
        spans = [extent(length, axes, sizes, at) for length, axes in zip(shape, self.dims, strict=True)]
        return Box(tuple(start for start, _ in spans), tuple(length for _, length in spans))

    def largest(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the largest piece, which is the first rank's."""
        return self.box(shape, sizes, dict.fromkeys(sizes, 0)).sizes

    def __str__(self) -> str:
        dims = ", ".join(" ".join(axes) or "-" for axes in self.dims)
        return f"[{dims}]" + (f" + {' '.join(sorted(self.partial))}" if self.partial else "")


def extent(length: int, axes: tuple[str, ...], sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, int]:
    """Returns (start, length) of the piece of a dim that the rank at the coordinates `at` holds.

    The dim of `length` elements is cut by each of `axes` in turn; `sizes[axis]` ranks stand along an axis.
    """
    start = 0
    for axis in axes:
        first, length = piece(length, sizes[axis], at[axis])
        start += first
    return start, length


def piece(length: int, parts: int, index: int) -> tuple[int, int]:
    """Returns (start, length) of piece `index` of `parts`, as `torch.chunk` cuts, with empty ones at the end.

    piece(7, 4, 2) == (4, 2), piece(7, 4, 3) == (6, 1), piece(2, 4, 3) == (2, 0)
    """
    step = longest(length, parts)
    start = min(index * step, length)
    return start, min(step, length - start)


def longest(length: int, parts: int) -> int:
    """Returns the length of all pieces but the last ones."""
    return -(-length // parts)

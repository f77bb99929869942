"""Where the elements of a tensor lie over the axes of a mesh.

    Placement.of(2, {0: "dp tp"})             dim 0 is cut among dp, each piece again among tp
    Placement.of(2, {1: "tp"}, partial="cp")  dim 1 is cut among tp; the ranks along cp hold summands of the values

Along any other axis the ranks hold the same. A dim is cut as `torch.chunk` does: even pieces, the last ones shorter or empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.parallel.layout import Box


@dataclass(frozen=True)
class Placement:
    """dims: for each dim of the tensor the axes that cut it, outermost first. partial: the axes along which ranks hold summands."""

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        named = [*(axis for axes in self.dims for axis in axes), *self.partial]
        if len(named) != len(set(named)):
            raise ValueError(f"{self}: an axis is named twice")

    @classmethod
    def of(cls, ndim: int, cuts: Mapping[int, str] | None = None, partial: str = "") -> Placement:
        """Of a tensor with `ndim` dims; `cuts[dim]` and `partial` name axes, separated by spaces. A dim may count from the end."""
        by_dim = {dim % ndim: tuple(axes.split()) for dim, axes in (cuts or {}).items()}
        return cls(tuple(by_dim.get(dim, ()) for dim in range(ndim)), frozenset(partial.split()))

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which ranks hold different values."""
        return self.partial.union(*self.dims)

    def cut(self, dim: int, axis: str) -> Placement:
        """`dim` is cut once more, by `axis`, innermost."""
        return replace(self, dims=(*self.dims[:dim], (*self.dims[dim], axis), *self.dims[dim + 1 :]))

    def joined(self, dim: int) -> Placement:
        """`dim` without its innermost cut."""
        return replace(self, dims=(*self.dims[:dim], self.dims[dim][:-1], *self.dims[dim + 1 :]))

    def summed(self, axes: frozenset[str]) -> Placement:
        """No longer summands along `axes`."""
        return replace(self, partial=self.partial - axes)

    def summands(self, axes: frozenset[str]) -> Placement:
        """Summands along `axes` too."""
        return replace(self, partial=self.partial | axes)

    def dual(self, summed: frozenset[str] = frozenset()) -> Placement:
        """Where the gradient of such a tensor lies: each summand's is that of the sum; along `summed` and where ranks hold the same, but
        use it for different things, gradients are summands."""
        return Placement(self.dims, summed - self.axes)

    def box(self, shape: tuple[int, ...], sizes: Mapping[str, int], at: Mapping[str, int]) -> Box:
        """What of a tensor of `shape` the rank at the coordinates `at` holds, `sizes[axis]` ranks standing along each axis."""
        spans = [extent(length, axes, sizes, at) for length, axes in zip(shape, self.dims, strict=True)]
        return Box(tuple(start for start, _ in spans), tuple(length for _, length in spans))

    def largest(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the largest piece, that of the first rank."""
        return self.box(shape, sizes, dict.fromkeys(sizes, 0)).sizes

    def __str__(self) -> str:
        dims = ", ".join(" ".join(axes) or "-" for axes in self.dims)
        return f"[{dims}]" + (f" + {' '.join(sorted(self.partial))}" if self.partial else "")


def extent(length: int, axes: tuple[str, ...], sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, int]:
    """Start and length of the piece of a dim that the rank `at` holds, cut by each of `axes` in turn."""
    start = 0
    for axis in axes:
        first, length = piece(length, sizes[axis], at[axis])
        start += first
    return start, length


def piece(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of the `index`-th of `parts` pieces, as `torch.chunk` cuts, with empty ones at the end.

    piece(7, 4, 2) == (4, 2), piece(7, 4, 3) == (6, 1), piece(2, 4, 3) == (2, 0)
    """
    step = longest(length, parts)
    start = min(index * step, length)
    return start, min(step, length - start)


def longest(length: int, parts: int) -> int:
    """The length of all pieces but the last ones."""
    return -(-length // parts)

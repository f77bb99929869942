"""Boxes in the coordinates of a global tensor, and the layout of a parameter: which boxes of it a rank holds, and
where.

The file holds plain data about shapes, and takes views of tensors by it; it does no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from torch import Tensor

from shoal.comm.wire import sent


@sent
@dataclass(frozen=True)
class Box:
    """A hyper-rectangle of a tensor: `sizes[d]` elements from `offsets[d]` along each dim `d`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def to_wire(self) -> list[int]:
        return [*self.offsets, *self.sizes]

    @classmethod
    def from_wire(cls, *numbers: int) -> Box:
        dims = len(numbers) // 2
        return cls(numbers[:dims], numbers[dims:])

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box: `tensor[box.slices]` is a view of it."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def shifted(self, by: tuple[int, ...]) -> Box:
        """Returns this box moved by `by` along each dim."""
        return Box(tuple(offset + step for offset, step in zip(self.offsets, by, strict=True)), self.sizes)

    def within(self, outer: Box) -> Box:
        """Returns this box in the coordinates of a tensor that holds the elements of `outer`."""
        return self.shifted(tuple(-offset for offset in outer.offsets))

    def cut(self, most: int) -> list[Box]:
        """Cuts the box into boxes of at most `most` elements; one that is small enough stays as it is."""
        if self.numel <= most:
            return [self]
        return [
            part.shifted(self.offsets)
            for start in range(0, self.numel, most)
            for part in boxes_of_range(self.sizes, start, min(start + most, self.numel))
        ]


def intersect(a: Box, b: Box) -> Box | None:
    """The box of the elements that lie in both, or None when there are none."""
    starts = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    stops = tuple(min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
        return None
    return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def subtract(a: Box, b: Box) -> list[Box]:
    """The elements of `a` that do not lie in `b`, which lies within `a`, as boxes: at most two for each dim."""
    rest, offsets, sizes = [], list(a.offsets), list(a.sizes)
    for dim, (start, size) in enumerate(zip(b.offsets, b.sizes, strict=True)):
        for first, stop in ((offsets[dim], start), (start + size, offsets[dim] + sizes[dim])):
            if first < stop:
                rest.append(
                    Box((*offsets[:dim], first, *offsets[dim + 1 :]), (*sizes[:dim], stop - first, *sizes[dim + 1 :]))
                )
        offsets[dim], sizes[dim] = start, size
    return rest


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of the flattened (row-major) tensor as boxes, in flat order.

    A tensor of k >= 1 dims gives at most 2k-1 boxes: the rest of the first row, whole rows, the beginning of the last
    row, where a cut row is again a tensor of k-1 dims (its end takes at most k-1 boxes, and so does its beginning). A
    box is contiguous in memory, so its elements in row-major order are a stretch of the range. An empty range has no
    boxes.

        boxes_of_range((3, 4), 2, 9)     . . 1 1      Box((0, 2), (1, 2))
                                         2 2 2 2      Box((1, 0), (1, 4))
                                         3 . . .      Box((2, 0), (1, 1))
    """
    assert 0 <= start <= stop <= prod(shape), f"range [{start}, {stop}) of a tensor of shape {shape}"
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:
        return _in_row(shape, end_whole, start - end_whole * row, stop - end_whole * row)
    boxes = []
    if start < first_whole * row:
        boxes += _in_row(shape, first_whole - 1, start - (first_whole - 1) * row, row)
    if first_whole < end_whole:
        boxes.append(Box((first_whole,) + (0,) * (len(shape) - 1), (end_whole - first_whole, *shape[1:])))
    if end_whole * row < stop:
        boxes += _in_row(shape, end_whole, 0, stop - end_whole * row)
    return boxes


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    """Boxes of the range [start, stop) of row `index`, in coordinates of the whole tensor."""
    return [Box((index, *box.offsets), (1, *box.sizes)) for box in boxes_of_range(shape[1:], start, stop)]


@sent
@dataclass(frozen=True)
class Part:
    """A box of the rank's own tensor (`local`) and the box of the global tensor that it holds (`world`); equal
    sizes."""

    local: Box
    world: Box

    def __post_init__(self) -> None:
        assert self.local.sizes == self.world.sizes, (
            f"a part maps boxes of equal sizes, not {self.local} to {self.world}"
        )


@sent
@dataclass(frozen=True)
class Layout:
    """Says what a rank holds of one parameter; layouts are kept beside the model, keyed by parameter name.

    shape: of the global parameter, as the single-device model has it. Checkpoints know only this one.
    parts: pairs local slice -> global slice. One pair covers a replicated or evenly cut parameter. Several cover a
        fused qkv (this rank's rows of q, of k and of v are apart in the global tensor, adjacent in the local one), and
        fewer KV heads than tensor-parallel ranks (two ranks name the same global slice).
    alike: every rank that has a part of this one's model holds the whole parameter.
    apart: the variant of the parameter, where its replicas differ from those of the model's other parameters.
        "experts": other ranks hold other experts (see Mesh.experts). "tied": other stages of the pipeline hold it too.
    reduce: mesh axes along which the gradient is summed beside its replicas.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    alike: bool = False
    apart: str = ""
    reduce: tuple[str, ...] = ()

    @classmethod
    def replicated(cls, shape: tuple[int, ...], reduce: tuple[str, ...] = ()) -> Layout:
        """Returns the layout of a parameter that every rank holds whole."""
        whole = Box.whole(shape)
        return cls(tuple(shape), (Part(whole, whole),), alike=True, reduce=reduce)

    @classmethod
    def cut(cls, shape: tuple[int, ...], dim: int, stretches: Sequence[tuple[int, int]]) -> Layout:
        """Returns the layout of a rank that holds the `stretches` [start, stop) of `dim`, adjacent in its own
        tensor."""
        parts, at = [], 0
        for start, stop in stretches:
            sizes = (*shape[:dim], stop - start, *shape[dim + 1 :])
            here, there = ([0] * len(shape) for _ in range(2))
            here[dim], there[dim] = at, start
            parts.append(Part(Box(tuple(here), sizes), Box(tuple(there), sizes)))
            at += stop - start
        return cls(tuple(shape), tuple(parts))

    def within(self, dim: int, start: int, stop: int) -> Layout:
        """Returns the layout of the elements [start, stop) of `dim`, of which this layout holds all.

        It serves a rank that has some of the experts, stacked along `dim`.
        """
        parts = []
        for part in self.parts:
            sizes, there = list(part.world.sizes), list(part.world.offsets)
            sizes[dim], there[dim] = stop - start, start
            parts.append(Part(Box(part.local.offsets, tuple(sizes)), Box(tuple(there), tuple(sizes))))
        return replace(self, parts=tuple(parts), alike=False, apart="experts")

    @property
    def of_experts(self) -> bool:
        """True if ranks along ep hold other experts."""
        return self.apart == "experts"

    @cached_property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        ends = (
            [offset + size for offset, size in zip(part.local.offsets, part.local.sizes, strict=True)]
            for part in self.parts
        )
        return tuple(map(max, zip(*ends, strict=True)))

    def own_part(self, whole: Tensor) -> Tensor:
        """Returns this rank's tensor, copied out of the `whole` one; `whole` itself if the rank holds all of it."""
        if self.own_shape == self.shape:
            return whole
        own = whole.new_empty(self.own_shape)
        for part in self.parts:
            own[part.local.slices] = whole[part.world.slices]
        return own

    def put_into(self, whole: Tensor, own: Tensor) -> None:
        """Writes this rank's tensor `own` to its positions in the `whole` one."""
        for part in self.parts:
            whole[part.world.slices] = own[part.local.slices]

    def boxes(self, start: int, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Splits a stretch of this rank's flattened tensor into boxes of the global tensor; yields (box, view of
        `flat`).

        start: index of the first element of `flat` in the flattened tensor of this rank
        flat: the elements from `start` on, 1-d
        """
        if prod(self.shape) == 0:
            yield Box.whole(self.shape), flat.view(self.shape)
            return
        at = 0
        for box in boxes_of_range(self.own_shape, start, start + flat.numel()):
            view = flat[at : at + box.numel].view(box.sizes)
            at += box.numel
            for part in self.parts:
                inside = intersect(box, part.local)
                if inside is not None:
                    to_world = tuple(
                        there - here for there, here in zip(part.world.offsets, part.local.offsets, strict=True)
                    )
                    yield inside.shifted(to_world), view[inside.within(box).slices]

"""The boxes of named global tensors that a rank writes and reads, and the choice of who writes a replicated tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from shoal.parallel.layout import Box, Layout

SMALL_BYTES = 64 * 1024
"""Tensors below this size are written whole by one rank: cutting them would cost more in headers than it shares out."""

BOX_BYTES = 16 * 2**20
"""Largest box on disk. A reader fetches whole saved boxes, so this bounds what it reads beyond its need, and its
memory."""


@dataclass(frozen=True)
class Piece:
    """A box that this rank writes.

    name: of the global tensor
    shape: of the global tensor
    box: the elements
    tensor: their values, of shape `box.sizes`
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """All of a tensor that this rank alone holds."""
        shape = tuple(tensor.shape)
        return cls(name, shape, Box.whole(shape), tensor)

    def copied(self) -> Piece:
        """The piece with values of its own."""
        return replace(self, tensor=self.tensor.clone())

    def __post_init__(self) -> None:
        assert tuple(self.tensor.shape) == self.box.sizes, (
            f"{self.name}: tensor {tuple(self.tensor.shape)} for {self.box}"
        )


@dataclass(frozen=True)
class Want:
    """A box that this rank reads.

    name: of the global tensor
    shape: of the global tensor
    box: the elements
    into: where they go, of shape `box.sizes`; any dtype, stride and device
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    into: torch.Tensor

    @classmethod
    def whole(cls, name: str, into: Tensor) -> Want:
        """All of the tensor, which is of the shape of `into`."""
        shape = tuple(into.shape)
        return cls(name, shape, Box.whole(shape), into)

    def __post_init__(self) -> None:
        assert tuple(self.into.shape) == self.box.sizes, f"{self.name}: tensor {tuple(self.into.shape)} for {self.box}"


def share(name: str, tensor: torch.Tensor, layout: Layout, rank: int, size: int) -> list[Piece]:
    """Returns the pieces that `rank` writes of a tensor that `size` ranks hold alike; together they write each element
    once.

    name: of the global tensor
    tensor: of shape `layout.own_shape`, or a flat view of that many elements
    layout: which elements of the global tensor it holds

    The flat range is cut evenly, so that all ranks write at the same time. A small tensor goes whole to one rank,
    chosen by a hash of its name that is the same in every process.
    """
    flat = tensor.reshape(-1)
    start, stop = (flat.numel() * r // size for r in (rank, rank + 1))
    if flat.nbytes < SMALL_BYTES:
        if crc32(name.encode()) % size != rank:
            return []
        start, stop = 0, flat.numel()
    return [Piece(name, layout.shape, box, part) for box, part in layout.boxes(start, flat[start:stop])]


def cut(piece: Piece, limit: int) -> list[Piece]:
    """Returns the piece as pieces of at most `limit` bytes; a piece that is small enough stays as it is."""
    if piece.tensor.nbytes <= limit:
        return [piece]
    return [
        Piece(piece.name, piece.shape, box, piece.tensor[box.within(piece.box).slices])
        for box in piece.box.cut(limit // piece.tensor.element_size())
    ]


def wants_of(title: str, layout: Layout, into: Tensor, start: int = 0) -> list[Want]:
    """Returns the wants that fill `into`: the elements from `start` on of this rank's part of the global tensor
    `title`."""
    if into.is_contiguous():
        return [Want(title, layout.shape, box, part) for box, part in layout.boxes(start, into.view(-1))]
    assert layout.own_shape == layout.shape == tuple(into.shape), (
        f"{title} is read in parts into a tensor that is not contiguous"
    )
    return [Want(title, layout.shape, Box.whole(layout.shape), into)]


def canonical(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value

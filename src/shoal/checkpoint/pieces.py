"""What a rank writes and reads: boxes of named global tensors. Who writes what of a replicated tensor is decided here."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import torch

from shoal.parallel.layout import Box, Layout, boxes_of_range

SMALL_BYTES = 64 * 1024
"""Tensors below this size are written whole by one rank: cutting them would cost more in headers than it shares out."""

BOX_BYTES = 16 * 2**20
"""Largest box on disk. A reader fetches whole saved boxes, so this bounds what it reads beyond its need, and its memory."""


@dataclass(frozen=True)
class Piece:
    """This rank writes `tensor` (of shape `box.sizes`) into `box` of the global tensor `name` of shape `shape`."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        assert tuple(self.tensor.shape) == self.box.sizes, f"{self.name}: tensor {tuple(self.tensor.shape)} for {self.box}"


@dataclass(frozen=True)
class Want:
    """This rank reads `box` of the global tensor `name` into `into` (of shape `box.sizes`; any dtype, stride and device)."""

    name: str
    shape: tuple[int, ...]
    box: Box
    into: torch.Tensor

    def __post_init__(self) -> None:
        assert tuple(self.into.shape) == self.box.sizes, f"{self.name}: tensor {tuple(self.into.shape)} for {self.box}"


def share(name: str, tensor: torch.Tensor, layout: Layout, rank: int, size: int) -> list[Piece]:
    """The pieces that `rank` writes of a tensor that `size` ranks hold alike, as `layout` says; over all ranks each element is written once.

    The flat range is cut evenly, so that all ranks write at the same time; a small tensor goes whole to one rank, chosen by
    a hash of its name that is the same in every process. `tensor` has `layout.own_shape`, or is a flat view of that many elements.
    """
    flat = tensor.reshape(-1)
    start, stop = (flat.numel() * r // size for r in (rank, rank + 1))
    if flat.nbytes < SMALL_BYTES:
        if crc32(name.encode()) % size != rank:
            return []
        start, stop = 0, flat.numel()
    return [Piece(name, layout.shape, box, part) for box, part in layout.boxes(start, flat[start:stop])]


def cut(piece: Piece, limit: int) -> list[Piece]:
    """The same elements as pieces of at most `limit` bytes; a piece that is small enough stays as it is."""
    if piece.tensor.nbytes <= limit:
        return [piece]
    numel, step = piece.tensor.numel(), limit // piece.tensor.element_size()
    return [
        Piece(piece.name, piece.shape, box.shifted(piece.box.offsets), piece.tensor[box.slices])
        for start in range(0, numel, step)
        for box in boxes_of_range(piece.box.sizes, start, min(start + step, numel))
    ]

"""The role of a rank in writing a checkpoint: what it holds, and its share of what several ranks have alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shoal.checkpoint.pieces import Piece, share
from shoal.chunks import Slot
from shoal.parallel.layout import Layout


@dataclass(frozen=True)
class WriterRole:
    """The role of this rank in writing a checkpoint: what it holds, and its share of the writing.

    layouts: what it holds of each parameter
    rank, size: its index among the replicas
    place, places: its index among the ranks that have the parts of one model
    apart: the roles for parameters that other ranks replicate (see Layout.apart): experts have fewer replicas of more
        parts, weights tied across stages have more replicas
    silent: buffers that this rank does not write, since the last stage, which runs all of the model's forward, has them
        too
    holds_copies: of what several ranks have alike each gives all that it has, not its share
    """

    layouts: Mapping[str, Layout]
    rank: int = 0
    size: int = 1
    place: int = 0
    places: int = 1
    apart: Mapping[str, WriterRole] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    holds_copies: bool = False

    def of(self, name: str | None) -> WriterRole:
        """Returns the role for the parameter `name`."""
        layout = None if name is None else self.layouts.get(name)
        return self if layout is None else self.apart.get(layout.apart, self)

    def layout(self, name: str | None, tensor: Tensor, slot: Slot | None = None) -> Layout:
        """Returns the layout of `tensor`: that of the parameter `name` if the shapes agree, else a replicated one.

        `slot`: the tensor is the part of the parameter in this slot.
        """
        layout = None if name is None else self.layouts.get(name)
        if layout is not None and tensor.shape == (torch.Size(layout.own_shape) if slot is None else slot.shape):
            return layout
        return Layout.replicated(tuple(tensor.shape))

    def share(self, title: str, name: str | None, tensor: Tensor) -> list[Piece]:
        """Returns the pieces that this rank writes of a tensor that is equal on all replicas."""
        layout, mine = self.layout(name, tensor), self.of(name)
        if title in self.silent:
            return []
        if layout.alike:
            return share(title, tensor, layout, mine.rank * self.places + self.place, mine.size * self.places)
        return share(title, tensor, layout, mine.rank, mine.size)

    def part(self, title: str, slot: Slot | None, tensor: Tensor) -> list[Piece]:
        """Returns the pieces that this rank writes of a tensor that only its replica has.

        `slot`: the tensor is the part of a parameter, or of its state, in this slot; None: it is whole.
        """
        layout = Layout.replicated(tuple(tensor.shape)) if slot is None else self.layouts[slot.name]
        flat, start = tensor.reshape(-1), 0 if slot is None else slot.start
        if layout.alike and self.places > 1:  # the other ranks of this replica have the same
            first, last = (flat.numel() * place // self.places for place in (self.place, self.place + 1))
            flat, start = flat[first:last], start + first
        return [Piece(title, layout.shape, box, part) for box, part in layout.boxes(start, flat)]

    @property
    def with_copies(self) -> WriterRole:
        """This role for who is asked what this rank holds, whoever else has it too."""
        apart = {kind: mine.with_copies for kind, mine in self.apart.items()}
        return replace(self, rank=0, size=1, place=0, places=1, apart=apart, holds_copies=True)

    @property
    def alone(self) -> WriterRole:
        """This role as that of the only replica."""
        return replace(self, rank=0, size=1, apart={kind: mine.alone for kind, mine in self.apart.items()})

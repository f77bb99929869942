"""Pieces of a chunk, which an optimizer sees as its parameters, and the state of the chunk's own parameters in them."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks import Buffer, Slot

State = MutableMapping[Tensor, dict[str, Any]]


@dataclass(eq=False)
class Piece:
    """A range of a chunk, which the inner optimizer sees as one parameter.

    - `adopted`: its state that lies in the chunk's flat state
    - `seen`: all of its state when last looked at
    """

    start: int
    stop: int
    flat: nn.Parameter
    adopted: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)


class FlatChunk:
    """A chunk as the inner optimizer sees it: its pieces, and their state, one flat tensor a key of `per_element`.

    State that is not per element, such as a count of updates, is one value a piece. So parameters of one piece have the
    same history; where one is left out of an update its piece is cut, for good.
    """

    def __init__(self, chunk: Buffer, block: int, per_element: set[str]) -> None:
        assert chunk.grad is not None
        self.chunk, self._block, self._per_element = chunk, block, per_element
        self._offsets = [slot.offset for slot in chunk.slots]
        self._flat_state: dict[str, Tensor] = {}
        self.padding = [chunk.master[gap] for gap in chunk.gaps]
        self.pieces = self._cut([])

    def _cut(self, borders: Collection[int]) -> list[Piece]:
        starts = sorted({0, *borders, *range(0, self.chunk.size, self._block)})
        return [self._piece(start, stop) for start, stop in pairwise([*starts, self.chunk.size])]

    def _piece(self, start: int, stop: int) -> Piece:
        flat = nn.Parameter(self.chunk.master[start:stop])
        flat.grad = self.chunk.grad[start:stop]  # type: ignore[index]
        return Piece(start, stop, flat)

    def _slot_at(self, position: int) -> Slot:
        return self.chunk.slots[bisect_right(self._offsets, position) - 1]

    def _flat(self, key: str, like: Tensor) -> Tensor:
        if key not in self._flat_state:
            self._flat_state[key] = torch.zeros(self.chunk.size, dtype=like.dtype, device=like.device)
        return self._flat_state[key]

    def _is_per_element(self, key: str, value: Any, shape: torch.Size) -> bool:
        if isinstance(value, Tensor) and value.shape == shape and shape.numel() > 1:
            self._per_element.add(key)
        return isinstance(value, Tensor) and key in self._per_element

    def leave_out(self, untouched: Collection[str], state: State) -> bool:
        """Takes the gradient from the pieces of `untouched` parameters; returns whether pieces had to be cut for
        that."""
        slots = self.chunk.slots
        borders = [b.offset for a, b in pairwise(slots) if (a.name in untouched) != (b.name in untouched)]
        before = len(self.pieces)
        self.pieces = [part for piece in self.pieces for part in self._split(piece, borders, state)]
        for piece in self.pieces:
            left_out = self._slot_at(piece.start).name in untouched
            piece.flat.grad = None if left_out else self.chunk.grad[piece.start : piece.stop]  # type: ignore[index]
        return len(self.pieces) != before

    def _split(self, piece: Piece, borders: Sequence[int], state: State) -> list[Piece]:
        """Cuts `piece` at the `borders` inside it; each part goes on with the state of the whole."""
        inside = sorted({border for border in borders if piece.start < border < piece.stop})
        if not inside:
            return [piece]
        values = state.pop(piece.flat, {})
        parts = [self._piece(start, stop) for start, stop in pairwise([piece.start, *inside, piece.stop])]
        for part in parts:
            self._install(part, values, piece.adopted, state)
        return parts

    def _install(self, piece: Piece, values: Mapping[str, Any], per_element: Collection[str], state: State) -> None:
        """Gives `piece` its part of the flat state, and copies of the other `values`."""
        piece.adopted = {key: self._flat_state[key][piece.start : piece.stop] for key in per_element}
        if values:
            state[piece.flat] = {
                key: piece.adopted[key] if key in per_element else copy.deepcopy(v) for key, v in values.items()
            }

    def adopt(self, state: State) -> bool:
        """Moves state that an update made, or bound anew, into the flat state; returns whether `views` have changed."""
        changed = False
        for piece in self.pieces:
            values = state.get(piece.flat, {})
            for key, value in values.items():
                if value is not piece.adopted.get(key) and self._is_per_element(key, value, piece.flat.shape):
                    if key not in piece.adopted:
                        piece.adopted[key] = self._flat(key, value)[piece.start : piece.stop]
                    values[key] = piece.adopted[key].copy_(value)
            if len(values) != len(piece.seen) or any(value is not piece.seen.get(key) for key, value in values.items()):
                piece.seen, changed = dict(values), True
        return changed

    def views(self, slot: Slot, state: State) -> dict[str, Any]:
        """Looks up a parameter's state: views where it is per element, else the values of its piece."""
        piece = self.pieces[bisect_right(self.pieces, slot.offset, key=lambda piece: piece.start) - 1]
        values = state.get(piece.flat, {})
        return {
            key: slot.view(self._flat_state[key]) if key in piece.adopted else value for key, value in values.items()
        }

    def put(self, saved: Mapping[str, Mapping[str, Any]], state: State) -> None:
        """Replaces all state by `saved`, given by parameter."""
        for piece in self.pieces:
            state.pop(piece.flat, None)
        self._flat_state = {}
        shared: list[dict[str, Any]] = []
        for slot in self.chunk.slots:
            values = saved.get(slot.name, {})
            mine = {key for key, value in values.items() if self._is_per_element(key, value, slot.shape)}
            for key in mine:
                slot.view(self._flat(key, values[key])).copy_(values[key])
            shared.append(
                {key: None if key in mine else value for key, value in values.items()} | {"per element": mine}
            )
        slots = self.chunk.slots
        self.pieces = self._cut([slots[i].offset for i in range(1, len(slots)) if not equal(shared[i - 1], shared[i])])
        for piece in self.pieces:
            at = bisect_right(self._offsets, piece.start) - 1
            self._install(piece, saved.get(slots[at].name, {}), shared[at]["per element"], state)


def equal(a: Any, b: Any) -> bool:
    """Compares tensors bitwise, mappings by key."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)

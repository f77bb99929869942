"""Assigns parameters to chunks: pure functions of names, shapes, dtypes and the chunk size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.chunks.spec import Slot, aligned, evenly, extent

Described = tuple[str, torch.Size, "ChunkKey"]
Cut = list[tuple["ChunkKey", tuple[Slot, ...]]]


@dataclass(frozen=True)
class ChunkKey:
    """Properties that the parameters of one chunk share.

    - `group`: which ranks have them (see `make`)
    - `options`: index of the optimizer group
    - `sparse`: name of a parameter whose gradient is rows (nn.Embedding with sparse=True), alone in its chunk
    - `stages`: those of this rank's stages of a pipeline that have them; none where it makes no difference
    """

    dtype: torch.dtype
    group: str
    options: int
    trainable: bool
    sparse: str | None = None
    stages: tuple[int, ...] = ()


def assign(parameters: Iterable[Described], chunk_bytes: int, grad_itemsize: int) -> Cut:
    """Cuts `parameters` (name, shape, key) into chunks of about `chunk_bytes` of gradient.

    A chunk more than half full is closed before it would grow beyond that; an emptier one takes the next parameter
    whole. So no bias travels alone between two large weights.

    Parameters come in the order in which their gradients are expected, and stay in it; chunks are ordered by their last
    parameter, since that is when they are full. Slots are aligned for the narrowest type that the chunk holds.
    """
    open_chunks: dict[ChunkKey, list[Slot]] = {}
    done: list[tuple[int, ChunkKey, tuple[Slot, ...]]] = []
    last: dict[ChunkKey, int] = {}
    limit = max(1, chunk_bytes // grad_itemsize)

    def close(key: ChunkKey) -> None:
        done.append((last[key], key, tuple(open_chunks.pop(key))))

    for position, (name, shape, key) in enumerate(parameters):
        itemsize = min(key.dtype.itemsize, grad_itemsize)
        slots = open_chunks.get(key, [])
        offset = aligned(extent(slots), itemsize)
        if slots and offset + shape.numel() > limit and 2 * offset > limit:
            close(key)
            offset = 0
        open_chunks.setdefault(key, []).append(Slot(name, shape, offset))
        last[key] = position
    for key in list(open_chunks):
        close(key)
    return [(key, slots) for _, key, slots in sorted(done, key=lambda entry: entry[0])]


def assign_like(parameters: Iterable[Described], groups: Sequence[Sequence[str]], grad_itemsize: int) -> Cut:
    """Makes chunks of the parameters that `groups` name, in that order, as another rank cuts the same model."""
    described = {name: (shape, key) for name, shape, key in parameters}
    cut: Cut = []
    for names in groups:
        slots: list[Slot] = []
        key = described[names[0]][1]
        for name in names:
            itemsize = min(key.dtype.itemsize, grad_itemsize)
            offset = aligned(extent(slots), itemsize)
            slots.append(Slot(name, described[name][0], offset))
        cut.append((key, tuple(slots)))
    return cut


def deal(slots: Sequence[Slot], ranks: int, itemsize: int) -> tuple[tuple[Slot, ...], int]:
    """Lays whole parameters out for an even cut among `ranks`, the largest first, each on the rank that has least so
    far.

    Returns the slots, and the size of the chunk in elements.
    """
    lengths = [0] * ranks
    dealt: list[tuple[int, Slot]] = []
    for slot in sorted(slots, key=lambda slot: -slot.numel):
        rank = lengths.index(min(lengths))
        dealt.append((rank, replace(slot, offset=lengths[rank])))
        lengths[rank] += aligned(slot.numel, itemsize)
    each = aligned(max(lengths), itemsize)
    placed = (replace(slot, offset=rank * each + slot.offset) for rank, slot in dealt)
    return tuple(sorted(placed, key=lambda slot: slot.offset)), ranks * each


def lay_out(slots: Sequence[Slot], ranks: int, itemsize: int, whole_parameters: bool) -> tuple[tuple[Slot, ...], int]:
    """Lays a chunk out for an even cut among `ranks`: its slots, and its size in elements.

    `whole_parameters`: no cut goes through a parameter.
    """
    if whole_parameters:
        return deal(slots, ranks, itemsize)
    return tuple(slots), evenly(extent(slots), ranks, itemsize)


def departure(cut: Cut, order: Sequence[str]) -> float:
    """Mean time at which an element of the gradients can leave if parameters come in `order`, from 0 to 1 of the
    backward.

    Time is counted in elements that have come. Chunks leave in the order of `cut`, each when it and all before it are
    full.
    """
    sizes = {slot.name: slot.numel for key, slots in cut if key.trainable for slot in slots}
    whole = max(1, sum(sizes.values()))
    came, at = 0, {}
    for name in order:
        came += sizes.get(name, 0)
        at[name] = came
    leaves, total = 0, 0
    for key, slots in cut:
        if key.trainable:
            leaves = max(leaves, *(at.get(slot.name, whole) for slot in slots))
            total += leaves * sum(slot.numel for slot in slots)
    return total / whole**2

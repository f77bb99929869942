"""From a module's parameters to its chunks: in the order that is expected of their gradients, or in one that was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.chunks.allocate import Allocator, Shards, Shared
from shoal.chunks.assign import ChunkKey, Cut, Described, assign, assign_like, departure, lay_out
from shoal.chunks.chunk import Chunk, Slot
from shoal.chunks.gradient_pool import Lender
from shoal.chunks.tier import Tier
from shoal.comm import Group
from shoal.parallel.layout import Layout
from shoal.precision import Precision

OWN, ALIKE, EXPERTS, TIED, TIED_ALIKE = "own", "alike", "experts", "tied", "tied alike"
"""Groups of chunks: what this rank has a part of, of a model that is cut, what the ranks beside it have too, experts, which fewer ranks have than the rest, and weights tied across stages of a
pipeline, which more ranks have: parts, and what the ranks beside this one have too."""
_APART = {EXPERTS: "experts", TIED: "tied", TIED_ALIKE: "tied"}
PAYS = 0.05
"""Of the backward's time, by how much earlier gradients must leave on average for chunks to be cut anew."""


@dataclass(frozen=True)
class Keeping:
    """How chunks are kept among the ranks that have the same: `gradients` allocates those, `shards` are who cuts them, if anybody does."""

    gradients: Allocator
    shards: Shards | None


class ChunkMaker:
    """Makes the chunks of `module`, which has been built and not yet adopted.

    `member[name]` is a parameter's optimizer group. A tied parameter is known by its first name and stands there, where its gradient is
    complete. `keeping` is that of all chunks, rows excepted, but for those `apart`, by what they are (see parallel.layout); `allocate` gives what is not gradient.
    `groups[name]`: what is not ALIKE; that this rank has like those `beside` it: as which of how many. `has_versions`: of weights there will be several (see versions).
    """

    def __init__(
        self,
        module: nn.Module,
        member: Mapping[str, int],
        precision: Precision,
        allocate: Allocator,
        keeping: Keeping,
        apart: Mapping[str, Keeping] | None = None,
        groups: Mapping[str, str] | None = None,
        beside: tuple[int, int] = (0, 1),
        has_versions: bool = False,
    ) -> None:
        self._precision, self._allocate, self._beside, self._has_versions = precision, allocate, beside, has_versions
        self._keeping, self._apart = keeping, apart or {}
        self.described = described(module, member, precision, groups or {})

    @property
    def gradient_bytes(self) -> int:
        """Of all trainable parameters."""
        return sum(shape.numel() for _, shape, key in self.described if key.trainable) * self._precision.grad.itemsize

    def cut(self, chunk_bytes: int, order: Sequence[str] = ()) -> Cut:
        """Chunks of about `chunk_bytes` of gradient. Parameters in `order`, the others, or all, as expected: last registered first."""
        place = {name: index for index, name in enumerate(order)}
        ordered = sorted(self.described, key=lambda each: place.get(each[0], len(place)))
        return assign(ordered, chunk_bytes, self._precision.grad.itemsize)

    def cut_like(self, cut: Cut, beside: Group) -> Cut:
        """Chunks of the same parameters as those of the first rank of `beside`, among whom the model is cut: what is decided chunk by chunk is decided alike."""
        names = beside.broadcast_object([[slot.name for slot in slots] for _, slots in cut])
        return assign_like(self.described, names, self._precision.grad.itemsize)

    def make(self, cut: Cut) -> list[Chunk]:
        """Zeroed storage for `cut`; all ranks make it alike."""
        return [self._chunk(index, key, slots) for index, (key, slots) in enumerate(cut)]

    def _chunk(self, index: int, key: ChunkKey, slots: tuple[Slot, ...]) -> Chunk:
        apart = _APART.get(key.group, "")
        keeping, size = self._apart.get(apart, self._keeping), None
        shards = keeping.shards if self._is_cut(key, keeping.shards) else None
        if shards is not None:
            itemsize = min(key.dtype.itemsize, self._precision.grad.itemsize)
            slots, size = lay_out(slots, shards.group.size, itemsize, shards.whole_parameters)
        return Chunk(
            index,
            slots,
            key.dtype,
            self._precision.master if key.dtype.is_floating_point else key.dtype,
            self._precision.grad,
            key.trainable,
            self._allocate,
            keeping.gradients,
            bool(key.sparse),
            shards,
            self._precision.keep,
            size,
            self._beside if key.group in (ALIKE, TIED_ALIKE) else (0, 1),
            apart,
            self._has_versions,
        )

    @staticmethod
    def _is_cut(key: ChunkKey, shards: Shards | None) -> bool:
        return shards is not None and not key.sparse and (key.trainable or shards.cut_frozen)

    def lender(self, chunks: Sequence[Chunk], shared: Shared, tier: Tier | None = None) -> Lender | None:
        """Of whole gradients for those of `chunks` that borrow them, counted in `tier`; None if none does."""
        borrowing = [chunk for chunk in chunks if chunk.borrows]
        if not borrowing:
            return None
        largest = max(chunk.size for chunk in borrowing)
        return Lender(largest, self._precision.grad, borrowing[0].data.device, shared, tier)

    def better(self, chunk_bytes: int, order: Sequence[str]) -> Cut | None:
        """The cut for a recorded `order`, if gradients leave enough earlier than by the expected one."""
        now, then = self.cut(chunk_bytes), self.cut(chunk_bytes, order)
        return then if departure(then, order) < departure(now, order) - PAYS else None


def groups_of(layouts: Mapping[str, Layout]) -> dict[str, str]:
    """The group of each parameter."""
    kinds = {
        ("", False): OWN,
        ("", True): ALIKE,
        ("experts", False): EXPERTS,
        ("tied", False): TIED,
        ("tied", True): TIED_ALIKE,
    }
    return {name: kinds[layout.apart, layout.alike] for name, layout in layouts.items()}


def described(module: nn.Module, member: Mapping[str, int], precision: Precision, groups: Mapping[str, str]) -> list[Described]:
    """The parameters of `module` as `assign` takes them, last registered first, which is about the order of their gradients. `groups`: those that are not ALIKE."""
    owners = {
        f"{prefix}.{name}".lstrip("."): owner
        for prefix, owner in module.named_modules()
        for name, _ in owner.named_parameters(recurse=False)
    }
    found = []
    for name, parameter in reversed(list(module.named_parameters())):
        dtype = precision.parameter_dtype(parameter.dtype, owners[name])
        rows = isinstance(owners[name], nn.Embedding | nn.EmbeddingBag) and owners[name].sparse and parameter.requires_grad
        key = ChunkKey(dtype, groups.get(name, ALIKE), member[name], parameter.requires_grad, name if rows else None)
        found.append((name, torch.Size(parameter.shape), key))
    return found

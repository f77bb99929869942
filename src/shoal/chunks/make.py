"""Makes the chunks of a module's parameters, in the order in which gradients are expected or were seen to come."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal.chunks.allocate import Allocator, Shared
from shoal.chunks.assign import ChunkKey, Cut, Described, assign, assign_like, departure, lay_out
from shoal.chunks.chunk import Chunk
from shoal.chunks.gradient_pool import GradientPool
from shoal.chunks.shard import Shards
from shoal.chunks.spec import ChunkSpec, Slot, extent
from shoal.chunks.tier import Tier
from shoal.comm import Group
from shoal.parallel.layout import Layout
from shoal.precision import Precision

OWN, ALIKE, EXPERTS, TIED, TIED_ALIKE = "own", "alike", "experts", "tied", "tied alike"
"""Groups of parameters that never share a chunk, by who has them.

- OWN: this rank's part of a parameter that tensor parallelism cuts
- ALIKE: whole parameters, which all tensor-parallel ranks have
- EXPERTS: experts, which fewer ranks have than the rest
- TIED, TIED_ALIKE: weights tied across pipeline stages, which more ranks have: parts, and whole ones
"""
_VARIANT = {EXPERTS: "experts", TIED: "tied", TIED_ALIKE: "tied"}
PAYS = 0.05
"""Share of the backward's time by which gradients must leave earlier, on average, for chunks to be cut anew."""


@dataclass(frozen=True)
class Keeping:
    """Storage of chunks among the ranks that have the same ones: `gradients` allocates gradients; `shards` are the
    ranks that cut them, None if they are replicated."""

    gradients: Allocator
    shards: Shards | None


class ChunkMaker:
    """Makes the chunks of `module`, which has been built and not yet adopted.

    A tied parameter has its first name and the place of it, where its gradient is complete.

    - `member[name]`: a parameter's optimizer group
    - `allocate`: gives what is not gradient
    - `keeping[variant]`, else `keeping[""]`: how chunks of a variant (see ChunkSpec) are kept; sparse ones are not cut
    - `groups[name]`: a parameter's group, ALIKE if left out
    - `tp_copy`: (rank, size) of the tensor-parallel group, whose ranks have alike what is ALIKE
    - `has_versions`: of the weights there will be several versions (see `versions`)
    """

    def __init__(
        self,
        module: nn.Module,
        member: Mapping[str, int],
        precision: Precision,
        allocate: Allocator,
        keeping: Mapping[str, Keeping],
        groups: Mapping[str, str] | None = None,
        tp_copy: tuple[int, int] = (0, 1),
        has_versions: bool = False,
    ) -> None:
        self._precision, self._allocate, self._keeping = precision, allocate, keeping
        self._tp_copy, self._has_versions = tp_copy, has_versions
        self.described = described(module, member, precision, groups or {})

    def by_stage(self, names: Mapping[int, Collection[str]]) -> None:
        """Keeps this rank's stages of a pipeline in different chunks (see below)."""
        self.described = by_stage(self.described, names)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all trainable parameters."""
        return sum(shape.numel() for _, shape, key in self.described if key.trainable) * self._precision.grad.itemsize

    def cut(self, chunk_bytes: int, order: Sequence[str] = ()) -> Cut:
        """Cuts parameters into chunks of about `chunk_bytes` of gradient: those in `order`, then others, last
        registered first."""
        position = {name: index for index, name in enumerate(order)}
        ordered = sorted(self.described, key=lambda each: position.get(each[0], len(position)))
        return assign(ordered, chunk_bytes, self._precision.grad.itemsize)

    def cut_like(self, cut: Cut, group: Group) -> Cut:
        """Cuts as the first rank of the tensor-parallel `group` does, so that all of them decide alike chunk by
        chunk."""
        names = group.broadcast_object([[slot.name for slot in slots] for _, slots in cut])
        return assign_like(self.described, names, self._precision.grad.itemsize)

    def make(self, cut: Cut) -> list[Chunk]:
        """Makes zeroed chunks for `cut`; all ranks make them together."""
        return [self._chunk(index, key, slots) for index, (key, slots) in enumerate(cut)]

    def _chunk(self, index: int, key: ChunkKey, slots: tuple[Slot, ...]) -> Chunk:
        variant, precision = _VARIANT.get(key.group, ""), self._precision
        keeping, size = self._keeping.get(variant, self._keeping[""]), extent(slots)
        shards = keeping.shards if self._is_cut(key, keeping.shards) else None
        if shards is not None:
            itemsize = min(key.dtype.itemsize, precision.grad.itemsize)
            slots, size = lay_out(slots, shards.group.size, itemsize, shards.whole_parameters)
        spec = ChunkSpec(
            index,
            slots,
            size,
            key.dtype,
            precision.master if key.dtype.is_floating_point else key.dtype,
            precision.grad,
            key.trainable,
            bool(key.sparse),
            precision.keep,
            self._tp_copy if key.group in (ALIKE, TIED_ALIKE) else (0, 1),
            variant,
            self._has_versions,
            key.stages,
        )
        return Chunk(spec, self._allocate, keeping.gradients, shards)

    @staticmethod
    def _is_cut(key: ChunkKey, shards: Shards | None) -> bool:
        return shards is not None and not key.sparse and (key.trainable or shards.cut_frozen)

    def gradient_pool(self, chunks: Sequence[Chunk], shared: Shared, tier: Tier | None = None) -> GradientPool | None:
        """Makes the pool of whole gradients for those of `chunks` that borrow them, counted in `tier`; None if none
        does."""
        borrowing = [chunk for chunk in chunks if chunk.borrows]
        if not borrowing:
            return None
        largest = max(chunk.size for chunk in borrowing)
        return GradientPool(largest, self._precision.grad, borrowing[0].data.device, shared, tier)

    def better(self, chunk_bytes: int, order: Sequence[str]) -> Cut | None:
        """Cuts for a recorded `order`, if gradients then leave enough earlier than by the expected one; else None."""
        now, then = self.cut(chunk_bytes), self.cut(chunk_bytes, order)
        return then if departure(then, order) < departure(now, order) - PAYS else None


def groups_of(layouts: Mapping[str, Layout]) -> dict[str, str]:
    """Finds the group of each parameter."""
    kinds = {
        ("", False): OWN,
        ("", True): ALIKE,
        ("experts", False): EXPERTS,
        ("tied", False): TIED,
        ("tied", True): TIED_ALIKE,
    }
    return {name: kinds[layout.apart, layout.alike] for name, layout in layouts.items()}


def by_stage(parameters: Sequence[Described], names: Mapping[int, Collection[str]]) -> list[Described]:
    """Puts parameters of different stages into different chunks, on a rank that has several: their gradients come with
    different backwards.

    `names[stage]`: of its parameters. What stages of other ranks have too stays together, as it does there.
    """

    def apart(name: str, key: ChunkKey) -> ChunkKey:
        if len(names) == 1 or key.group in (TIED, TIED_ALIKE):
            return key
        return replace(key, stages=tuple(stage for stage, own in names.items() if name in own))

    return [(name, shape, apart(name, key)) for name, shape, key in parameters]


def described(
    module: nn.Module, member: Mapping[str, int], precision: Precision, groups: Mapping[str, str]
) -> list[Described]:
    """Lists the parameters of `module` as `assign` takes them, last registered first: about the order of their
    gradients.

    `groups`: those that are not ALIKE.
    """
    owners = {
        f"{prefix}.{name}".lstrip("."): owner
        for prefix, owner in module.named_modules()
        for name, _ in owner.named_parameters(recurse=False)
    }
    dtypes, found = precision.parameter_dtypes(module), []
    for name, parameter in reversed(list(module.named_parameters())):
        rows = (
            isinstance(owners[name], nn.Embedding | nn.EmbeddingBag) and owners[name].sparse and parameter.requires_grad
        )
        group = groups.get(name, ALIKE)
        if group in (TIED, TIED_ALIKE):
            rows = False  # where another stage has it, its gradient is of all rows
        key = ChunkKey(dtypes[name], group, member[name], parameter.requires_grad, name if rows else None)
        found.append((name, torch.Size(parameter.shape), key))
    return found

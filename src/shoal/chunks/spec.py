"""Description of a chunk before any memory is allocated: its slots, one a parameter, its size and its dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.chunks.allocate import ALIGNMENT
from shoal.comm.wire import sent


@sent
@dataclass(frozen=True)
class Slot:
    """Position of one parameter, or a part of it, in a flat tensor.

    - `shape`: of what lies here; 1-D for a part
    - `offset`: its first element in the flat tensor
    - `start`: of a part, its first element in the flattened parameter
    - `whole`: of a part, the parameter's shape
    """

    name: str
    shape: torch.Size
    offset: int
    start: int = 0
    whole: torch.Size | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def full(self) -> torch.Size:
        """Shape of the whole parameter, however much of it lies here."""
        return self.shape if self.whole is None else self.whole

    def view(self, flat: Tensor) -> Tensor:
        """View of the parameter inside `flat`."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)

    def between(self, start: int, stop: int) -> Slot | None:
        """Cuts the slot to the stretch [start, stop), counting offsets from `start`; None if nothing of it is there."""
        if self.numel == 0:  # at the border of two stretches it is of the first, which the end of the last one needs
            is_here = start < self.offset <= stop or (self.offset == start == 0 < stop)
            return replace(self, offset=self.offset - start) if is_here else None
        first, last = max(start, self.offset), min(stop, self.offset + self.numel)
        if first == self.offset and last == self.offset + self.numel:
            return replace(self, offset=first - start)
        if first >= last:
            return None
        return Slot(self.name, torch.Size([last - first]), first - start, first - self.offset, self.shape)


@sent
@dataclass(frozen=True)
class ChunkSpec:
    """Description of a chunk.

    - `index`: position among the chunks of this rank, which is the order of their exchange
    - `size`: elements, with the padding behind the last slot
    - `dtype`, `master_dtype`, `grad_dtype`: of what the module sees, what the optimizer updates, what is reduced
    - `trainable`: whether it has gradients and masters
    - `sparse`: autograd gives rows of the gradient of its only parameter
    - `keep`: how masters wider than the data are kept between updates (see `masters`)
    - `tp_copy`: (rank, size) of the tensor-parallel group where all its ranks have this chunk alike: they share the
      work of the norm, and count it once
    - `variant`: "experts" or "tied" where other ranks have it than have the rest of the model
    - `has_versions`: the data exists in several versions (see `versions`), so masters never are the data themselves
    - `stages`: see ChunkKey
    """

    index: int
    slots: tuple[Slot, ...]
    size: int
    dtype: torch.dtype
    master_dtype: torch.dtype
    grad_dtype: torch.dtype
    trainable: bool = True
    sparse: bool = False
    keep: str = "whole"
    tp_copy: tuple[int, int] = (0, 1)
    variant: str = ""
    has_versions: bool = False
    stages: tuple[int, ...] = ()

    @property
    def has_masters(self) -> bool:
        """Whether masters lie beside the data; elsewhere the data are the masters."""
        return self.trainable and (self.master_dtype != self.dtype or self.has_versions)


def adds_to(stage: int | None, stages: Sequence[int]) -> bool:
    """Whether a backward of `stage`, of any where that is None, may add to the gradient of a chunk of `stages`."""
    return stage is None or not stages or stage in stages


def flat_views(slots: Sequence[Slot], *flats: Tensor) -> list[list[Tensor]]:
    """1-D views of `slots`, which are in order, inside each of `flats`, all of one size.

    One call of torch for all slots, where `Slot.view` needs two a slot, 5 us.
    """
    sizes, end = list[int](), 0
    for slot in slots:
        sizes += [slot.offset - end, slot.numel]
        end = slot.offset + sizes[-1]
    return [list(flat.split_with_sizes([*sizes, flat.numel() - end])[1::2]) for flat in flats]


def extent(slots: Sequence[Slot]) -> int:
    """Elements up to the end of the last slot."""
    return slots[-1].offset + slots[-1].numel if slots else 0


def gaps(slots: Sequence[Slot], size: int) -> list[slice]:
    """Stretches of `size` elements in which no parameter lies: between slots, and behind the last one."""
    ends = [0, *(slot.offset + slot.numel for slot in slots)]
    starts = [*(slot.offset for slot in slots), size]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def aligned(numel: int, itemsize: int) -> int:
    """`numel` rounded up so that the next slot starts on ALIGNMENT bytes."""
    per_line = max(1, ALIGNMENT // itemsize)
    return -(-numel // per_line) * per_line


def evenly(numel: int, ranks: int, itemsize: int) -> int:
    """`numel` rounded up so that it is cut into even, aligned stretches among `ranks`."""
    return ranks * aligned(-(-numel // ranks), itemsize)

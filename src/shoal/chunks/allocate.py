"""Allocators of chunks: private storage of this process, or shared storage, which a group reduces in place."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shoal.comm import Group
from shoal.native.heap import in_large_pages

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


class Allocator(Protocol):
    """Gives flat, zeroed storage of `numel` elements whose first byte is aligned to ALIGNMENT."""

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor: ...


class Private:
    """Storage of this process on `device`, from torch's allocator, which aligns to at least 64 bytes on CPU and CUDA.

    `pinned`: page-locked memory of the host, for direct copies by a GPU.
    """

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self.device, self._pinned = device, pinned

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        empty = torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self._pinned)
        return in_large_pages(empty).zero_()


class Shared:
    """Storage that all ranks of `group` see, where its transport has such memory, else private; all allocate
    together."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._private = group, Private(device)

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        shared = self._group.allocate(numel, dtype) if self._private.device.type == "cpu" else None
        return self._private(numel, dtype) if shared is None else shared

    def buffers(self, number: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Allocates `number` tensors that all ranks see; none where there is no such memory."""
        if self._private.device.type != "cpu":
            return []
        return [flat for flat in (self._group.allocate(numel, dtype) for _ in range(number)) if flat is not None]

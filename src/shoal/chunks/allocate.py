"""Where a chunk's bytes come from. Private storage belongs to this process alone; shared storage is what a group reduces in place."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shoal.comm import Group

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


class Allocator(Protocol):
    """Gives flat, zeroed storage of `numel` elements whose first byte is aligned to ALIGNMENT."""

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor: ...


class Private:
    """Storage of this process on `device`, from torch's allocator, which aligns to at least 64 bytes on CPU and CUDA."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)


class Shards:
    """The ranks among which chunks are cut. Their weights lie in one memory for all of them where they have such, and are gathered elsewhere.

    `keep_gradients`: each keeps the whole gradient (ZeRO 1) rather than its stretch of it (ZeRO 2).
    """

    def __init__(self, group: Group, device: torch.device, keep_gradients: bool) -> None:
        self.group, self.keep_gradients, self._private = group, keep_gradients, Private(device)

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Zeroed storage, and whether it is the same on all ranks, which allocate alike."""
        common = self.group.allocate_common(numel, dtype) if self._private.device.type == "cpu" else None
        return (self._private(numel, dtype), False) if common is None else (common, True)


class Shared:
    """Storage that the ranks of `group` see, where its transport has such memory; private storage elsewhere. All ranks allocate alike."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._private = group, Private(device)

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        shared = self._group.allocate(numel, dtype) if self._private.device.type == "cpu" else None
        return self._private(numel, dtype) if shared is None else shared

    def buffers(self, number: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """So many tensors that the ranks see; none where there is no such memory."""
        if self._private.device.type != "cpu":
            return []
        return [flat for flat in (self._group.allocate(numel, dtype) for _ in range(number)) if flat is not None]

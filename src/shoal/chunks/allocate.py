"""Where a chunk's bytes come from. Private storage belongs to this process alone; shared storage is what a group reduces in place."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
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
    """Storage of this process on `device`, from torch's allocator, which aligns to at least 64 bytes on CPU and CUDA. `pinned`: of the host, where a
    GPU reaches it by itself."""

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self.device, self._pinned = device, pinned

    def __call__(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self._pinned)


class Weights(Enum):
    """How the weights of a chunk that is cut are kept."""

    COMMON = "in one memory, which all ranks see"
    WHOLE = "whole on each rank; after an update the ranks gather each other's stretches"
    PASSING = "each rank keeps its stretch, and gathers the others' while it uses them"


@dataclass(frozen=True)
class Shards:
    """The ranks among which chunks are cut, and what each keeps at that ZeRO `stage`: the whole gradient (1) or its stretch of it (2, 3), the whole
    weights (1, 2) or its stretch (3). Weights lie in one memory for all ranks where they have such.

    `group` talks about weights, `inside` about gradients: two groups of the same ranks, since at stage 3 both go on at once. `across`: the ranks
    that keep the same stretch, of other groups, if there are such (hybrid sharding); None: there is one copy of it. `home`: what is kept is on the
    host, and comes to `device` while it is used, also where there is a single rank. `whole_parameters`: no cut goes through a parameter.
    """

    group: Group
    inside: Group
    across: Group | None
    device: torch.device
    stage: int
    home: Private | None = None
    whole_parameters: bool = False

    @property
    def keep_gradients(self) -> bool:
        return self.stage < 2

    @property
    def cut_frozen(self) -> bool:
        return self.stage == 3

    @property
    def copy(self) -> tuple[int, int]:
        """Which of how many copies of the whole state this rank has a stretch of."""
        return (0, 1) if self.across is None else (self.across.rank, self.across.size)

    def weights_pass(self) -> bool:
        """Whether what is allocated will be PASSING; ranks ask alike."""
        if self.stage < 3 or self.device.type != "cpu" or self.home is not None:
            return self.stage == 3
        return self.group.allocate_common(0, torch.uint8) is None

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Weights]:
        """Storage for whole weights, and how it is kept; zeroed, or without memory if it is PASSING. Ranks allocate alike."""
        common = self.group.allocate_common(numel, dtype) if self.device.type == "cpu" and self.home is None else None
        if common is not None:
            return common, Weights.COMMON
        if self.stage < 3:
            return torch.zeros(numel, dtype=dtype, device=self.device), Weights.WHOLE
        data = torch.empty(numel, dtype=dtype, device=self.device)
        data.untyped_storage().resize_(0)
        return data, Weights.PASSING


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

"""Tensors in memory that all ranks of a host share, so that collectives read and write them where they are."""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.shm_segment import Meet, open_segment

Place = tuple[ctypes.Array[ctypes.c_void_p] | None, int]
"""Each rank's start of an allocation, and a number for allocation and offset that equal places share."""

NOWHERE: Place = (None, 0)
_PAGE = 4096
_OFFSET_BITS = 40  # as OFFSET in native/shm.c


@dataclass(frozen=True)
class _Allocation:
    memory: weakref.ref[mmap.mmap]
    start: int
    num_bytes: int
    bases: ctypes.Array[ctypes.c_void_p]
    number: int


class Allocations:
    """The shared allocations of a group of `size` ranks, seen by `rank`.

    An allocation is freed with its last tensor.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._count = 0
        self._live: list[_Allocation] = []
        self._starts: list[int] = []

    def common(self, meet: Meet, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a zeroed 1-D tensor in the same memory on every rank; None on every rank if one cannot have it.

        All ranks call it. Collectives take the tensor as any other one.
        """
        segment = open_segment(meet, self._rank, max(_PAGE, numel * dtype.itemsize))
        if segment is None or numel == 0:
            return None if segment is None else torch.zeros(0, dtype=dtype)
        return torch.frombuffer(segment.memory, dtype=dtype, count=numel)

    def allocate(self, meet: Meet, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a zeroed 1-D tensor for each rank; None on every rank where one cannot have it. All ranks call it."""
        self._count += 1
        num_bytes = numel * dtype.itemsize
        stride = math.ceil(num_bytes / _PAGE) * _PAGE
        segment = open_segment(meet, self._rank, self._size * stride)
        if segment is None:
            return None
        mine = torch.frombuffer(segment.memory, dtype=dtype, count=numel, offset=self._rank * stride)
        starts = [mine.data_ptr() + (rank - self._rank) * stride for rank in range(self._size)]
        bases = (ctypes.c_void_p * self._size)(*starts)
        fresh = _Allocation(weakref.ref(segment.memory), mine.data_ptr(), num_bytes, bases, self._count << _OFFSET_BITS)
        live = [allocation for allocation in self._live if allocation.memory() is not None]
        self._live = sorted([*live, fresh], key=lambda allocation: allocation.start)
        self._starts = [allocation.start for allocation in self._live]
        return mine

    def place(self, flat: Tensor) -> Place:
        """Returns where `flat` lies; NOWHERE if it is not in memory that was allocated here."""
        if not self._live:
            return NOWHERE
        start = flat.data_ptr()
        index = bisect_right(self._starts, start) - 1
        allocation = self._live[index]
        offset = start - allocation.start
        if index < 0 or offset + flat.nbytes > allocation.num_bytes or allocation.memory() is None:
            return NOWHERE
        return allocation.bases, allocation.number + offset

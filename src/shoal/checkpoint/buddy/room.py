"""Memory of a host in which a rank writes for its buddy, and the buddy keeps what is written.

It has no name (see comm.shm_segment): the buddy opens it by the rank's process, and has it still when that has ended.
Nothing is left of it once both have ended, however they do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shoal.comm.processes import process_table
from shoal.comm.shm_segment import nameless
from shoal.comm.wire import sent

Shape = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a tensor."""

_ALIGNED = 64
_PAGE = 4096


@sent
@dataclass(frozen=True)
class OpenFile:
    """Where another process of the host finds memory: the `descriptor` of an open file of process `pid`."""

    pid: int
    descriptor: int


@dataclass(frozen=True)
class Room:
    """Where tensors lie that all ranks have sent at the same time.

    - `mine`: those of this rank, in memory that its buddy has too; empty where they went as messages
    - `theirs`: those of its ward
    """

    mine: Sequence[Tensor]
    theirs: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for the ward."""
        return sum(each.nbytes for each in self.theirs)


class Lent:
    """Memory for tensors of `shapes` that this process makes, and another one may open until `close`. Raises OSError
    where there is none left."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._descriptor = nameless(_bytes_of(shapes))
        self.place = OpenFile(os.getpid(), self._descriptor)

    def close(self) -> None:
        """Ends the time in which it may be opened. Who has opened it has it until its last tensor is gone."""
        os.close(self._descriptor)


def opened(place: OpenFile, shapes: Sequence[Shape]) -> list[Tensor]:
    """Returns tensors of `shapes` in the memory at `place`, the same in all processes. Raises RuntimeError where this
    process cannot reach it."""
    path = f"/proc/{place.pid}/fd/{place.descriptor}"
    memory = torch.from_file(path, shared=True, size=_bytes_of(shapes), dtype=torch.uint8)
    return [
        memory[start : start + size.numel() * dtype.itemsize].view(dtype).view(size)
        for start, (size, dtype) in zip(_starts(shapes), shapes, strict=False)
    ]


def has_shape(tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> bool:
    return [(each.shape, each.dtype) for each in tensors] == list(shapes)


def lent_to_try() -> Lent | None:
    """Returns a little memory with which another process tries whether it can open any; None where there is none."""
    try:
        return Lent(()) if process_table() else None
    except OSError:
        return None


def can_open(place: OpenFile | None) -> bool:
    """Returns whether this process reaches what another one has `lent_to_try`."""
    try:
        return place is not None and opened(place, ()) == []
    except RuntimeError:  # it may not see the other's files
        return False


def _bytes_of(shapes: Sequence[Shape]) -> int:
    return max(_PAGE, *_starts(shapes))


def _starts(shapes: Sequence[Shape]) -> Iterator[int]:
    """Yields where each tensor begins, and where all of them end."""
    return accumulate((-(-size.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED for size, dtype in shapes), initial=0)

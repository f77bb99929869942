"""All-reduce through shared memory, for the CPU ranks of one host: no socket, each byte copied in, summed once, copied out.

The segment is a file in /dev/shm, for this user alone, that has no name any more once every rank has mapped it: whatever kills the
ranks, nothing stays behind.

    page 0            a flag (counter) a rank, 128 bytes apart, and its process id
    then, twice       a slot a rank: a piece of its tensor, then in its own share of the slot the reduced values

A piece goes through two meetings: all have copied in -> each reduces its share -> all have reduced -> all copy out. The next piece uses
the other half, so nobody waits for readers. Every element is reduced in rank order, so all ranks get the same bits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.native import library

SLOT_BYTES = 2 * 2**20
"""A piece: small enough for the last-level cache to hold all slots, large enough that two meetings a piece cost little."""

_DIRECTORY = Path("/dev/shm")
_PAGE, _LINE = 4096, 128
_LOOK_NS = 100_000_000
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}


class Shared:
    """One rank's view of the segment of `size` ranks. Made by `open`, which all ranks call."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, pids: list[int | None], timeout: timedelta) -> None:
        self._rank, self._size, self._pids, self._timeout = rank, size, pids, timeout.total_seconds()
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        kernels = library()
        assert kernels is not None
        self._kernels, self._flags = kernels, self._bytes.data_ptr()
        self._meetings = self._pieces = 0

    @classmethod
    def open(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Shared | None:
        """The segment that rank 0 makes and the others map; None, on every rank, where one of them cannot (said as a warning)."""
        path, problem, memory = None, "", None
        if rank == 0:
            path = _DIRECTORY / f"shoal-{uuid.uuid4().hex}"
            store.set("segment", str(path))
        path = Path(store.get("segment").decode())
        try:
            if library() is None:
                raise OSError("there is no C compiler for the kernels")
            if rank == 0:
                _create(path, _PAGE + 2 * size * SLOT_BYTES)
                store.set("made", "")
            problem = store.get("made").decode()
            memory = None if problem else _map(path)
        except OSError as error:
            problem = f"rank {rank}: {error}"
            if rank == 0:
                store.set("made", problem)
        store.set(f"mapped/{rank}", f"{os.getpid()} {_pid_namespace()} {problem}")
        answers = [store.get(f"mapped/{other}").decode().split(" ", 2) for other in range(size)]
        if rank == 0:
            path.unlink(missing_ok=True)
        failed = next((answer[2] for answer in answers if answer[2]), "")
        if failed or memory is None:
            if rank == 0:
                warnings.warn(f"shared memory cannot be used, ranks talk through sockets instead: {failed}", stacklevel=4)
            return None
        pids = [int(pid) if namespace == _pid_namespace() else None for pid, namespace, _ in answers]
        return cls(memory, rank, size, pids, timeout)

    def all_reduce(self, flat: Tensor, op: str) -> None:
        """Replaces `flat` (contiguous, 1-D, CPU) by the `op` over all ranks' tensors. Raises RuntimeError if a rank dies or is late."""
        step = SLOT_BYTES // flat.element_size()
        for start in range(0, flat.numel(), step):
            self._piece(flat[start : start + step], op)

    def _piece(self, piece: Tensor, op: str) -> None:
        numel, half = piece.numel(), self._pieces % 2
        self._pieces += 1
        slots = [self._slot(half, rank, piece.dtype)[:numel] for rank in range(self._size)]
        cuts = [numel * rank // self._size for rank in range(self._size + 1)]
        slots[self._rank].copy_(piece)
        self._meet()
        mine = slice(cuts[self._rank], cuts[self._rank + 1])
        if mine.start < mine.stop:
            total = _COMBINE[op](slots[0][mine], slots[1][mine])
            for slot in slots[2:]:
                _COMBINE[op](total, slot[mine], out=total)
            slots[self._rank][mine] = total
        self._meet()
        for rank, slot in enumerate(slots):
            piece[cuts[rank] : cuts[rank + 1]] = slot[cuts[rank] : cuts[rank + 1]]

    def _slot(self, half: int, rank: int, dtype: torch.dtype) -> Tensor:
        start = _PAGE + (half * self._size + rank) * SLOT_BYTES
        return self._bytes[start : start + SLOT_BYTES].view(dtype)

    def _meet(self) -> None:
        """Returns when every rank has come here as often as this one."""
        self._meetings += 1
        self._kernels.shoal_post(ctypes.c_void_p(self._flags + self._rank * _LINE), self._meetings)
        deadline = time.monotonic() + self._timeout
        while (late := self._kernels.shoal_wait(self._flags, _LINE // 8, self._size, self._meetings, _LOOK_NS)) >= 0:
            if _has_ended(self._pids[late]):
                raise RuntimeError(f"the process of the group's rank {late} has ended")
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out after {self._timeout:.0f} s waiting for the group's rank {late}")


def _create(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # now, as an error, rather than later, as SIGBUS
    except OSError as error:
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        path.unlink()
        raise OSError(
            f"{_DIRECTORY} has {free / 2**20:.0f} MiB free of the {size / 2**20:.0f} MiB needed ({error.strerror})"
        ) from error
    finally:
        os.close(descriptor)


def _map(path: Path) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def _has_ended(pid: int | None) -> bool:
    """Whether the process is gone or a zombie; False where that cannot be seen."""
    if pid is None:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()

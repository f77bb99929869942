"""Anonymous memory that the processes of one host share: all of them have it or none.

It is a nameless file (memfd_create) with mode 0600, which the other ranks open through /proc/<pid>/fd. Having no name,
it leaves nothing behind, whatever kills the ranks; and the size of /dev/shm, which containers keep small, does not
limit it.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True)
class Segment:
    """Shared memory.

    - `memory`: zeros at first; freed with its last user
    - `pids`: the processes that share it, in rank order
    """

    memory: mmap.mmap
    pids: list[int]


@dataclass(frozen=True)
class _Offer:
    """Where rank 0's memory is found, or the `problem` why there is none."""

    problem: str
    host: str = ""
    pid: int = 0
    descriptor: int = -1


def open_segment(store: dist.Store, rank: int, size: int, num_bytes: int, obstacle: str = "") -> Segment | None:
    """Maps memory that rank 0 makes; returns None, on every rank, where one of them cannot map it (rank 0 warns).

    All ranks call it.

    - `store`: a store for this segment alone
    - `rank`, `size`: this rank, and the number of ranks
    - `num_bytes`: bytes of the segment
    - `obstacle`: why this rank cannot use a segment, if that is known beforehand
    """
    mine = _offer(num_bytes, obstacle) if rank == 0 else None
    try:
        if mine is not None:
            store.set("offer", json.dumps(mine.__dict__))
        offer = _Offer(**json.loads(store.get("offer")))
        memory, problem = None, obstacle or offer.problem
        if not problem:
            try:
                memory = _map(offer, num_bytes)
            except OSError as error:
                problem = f"rank {rank}: {error}"
        store.set(f"mapped/{rank}", json.dumps([problem, os.getpid()]))
        answers = [json.loads(store.get(f"mapped/{other}")) for other in range(size)]
    finally:
        if mine is not None and mine.descriptor >= 0:
            os.close(mine.descriptor)
    problems = [answer[0] for answer in answers if answer[0]]
    if problems and rank == 0:
        warnings.warn(f"shared memory cannot be used: {problems[0]}", stacklevel=4)
    return None if problems or memory is None else Segment(memory, [answer[1] for answer in answers])


def _offer(num_bytes: int, obstacle: str) -> _Offer:
    if obstacle:
        return _Offer(obstacle)
    descriptor = -1
    try:
        descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, num_bytes)  # an error now rather than SIGBUS later
        return _Offer("", _host(), os.getpid(), descriptor)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        return _Offer(f"rank 0 cannot have {num_bytes / 2**20:.1f} MiB of it ({error})")


def _map(offer: _Offer, num_bytes: int) -> mmap.mmap:
    if offer.host != _host():
        raise OSError("it is on another host, or in another container, than rank 0")
    with open(f"/proc/{offer.pid}/fd/{offer.descriptor}", "r+b") as file:
        return mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _host() -> str:
    """Identifies the processes that see the same /proc: the boot of the machine and the namespace of processes."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")

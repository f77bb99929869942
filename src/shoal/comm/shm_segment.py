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
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch.distributed as dist

from shoal.comm.processes import process_table
from shoal.units import size

Meet = Callable[[str], list[str]]
"""Gives the texts of all ranks in rank order; each rank calls it with its own."""

MOST_TEXT = 4096
"""Bytes of the longest text with which ranks meet."""


def meeting_in(store: dist.Store, rank: int, size: int) -> Meet:
    """Lets `size` ranks meet through a store that nothing else uses."""
    rounds = count()

    def meet(text: str) -> list[str]:
        number = next(rounds)
        store.set(f"{number}/{rank}", text)
        return [text if other == rank else store.get(f"{number}/{other}").decode() for other in range(size)]

    return meet


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


def open_segment(meet: Meet, rank: int, num_bytes: int, obstacle: str = "") -> Segment | None:
    """Maps memory that rank 0 makes; returns None, on every rank, where one of them cannot map it (rank 0 warns).

    All ranks call it.

    - `meet`: how they tell each other
    - `num_bytes`: bytes of the segment
    - `obstacle`: why this rank cannot use a segment, if that is known beforehand
    """
    mine = _offer(num_bytes, obstacle) if rank == 0 else None
    try:
        offer = _Offer(**json.loads(meet(json.dumps(mine.__dict__ if mine is not None else {}))[0]))
        memory, problem = None, obstacle or offer.problem
        if not problem:
            try:
                memory = _map(offer, num_bytes)
            except OSError as error:
                problem = f"rank {rank}: {str(error)[: MOST_TEXT // 8]}"
        answers = [json.loads(answer) for answer in meet(json.dumps([problem, os.getpid()]))]
    finally:
        if mine is not None and mine.descriptor >= 0:
            os.close(mine.descriptor)
    problems = [answer[0] for answer in answers if answer[0]]
    if problems and rank == 0:
        warnings.warn(f"shared memory cannot be used: {problems[0]}", stacklevel=4)
    return None if problems or memory is None else Segment(memory, [answer[1] for answer in answers])


def nameless(num_bytes: int) -> int:
    """Makes a nameless file of so many zero bytes of memory; returns its descriptor, which the caller closes. Raises
    OSError."""
    descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, num_bytes)  # an error now rather than SIGBUS later
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _offer(num_bytes: int, obstacle: str) -> _Offer:
    if obstacle:
        return _Offer(obstacle)
    try:
        return _Offer("", process_table(), os.getpid(), nameless(num_bytes))
    except OSError as error:
        return _Offer(f"rank 0 cannot have {size(num_bytes)} of it ({error})")


def _map(offer: _Offer, num_bytes: int) -> mmap.mmap:
    if offer.host != process_table():
        raise OSError("it is on another host, or in another container, than rank 0")
    with open(f"/proc/{offer.pid}/fd/{offer.descriptor}", "r+b") as file:
        return mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED)  # most pages are never touched

"""The contenders of `collectives`: what carries an operation between the ranks. Each step is one call: `step(operation,
num_bytes)`.

`num_bytes` are those of the large side: of the tensor that is reduced, gathered into, exchanged or copied whole. All
tensors are fp32 zeros, so that sums stay what they are; a step's tensors stay until it is called for another case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.processes import Build, Step
from shoal.comm import Group
from shoal.comm.shm import Shared
from shoal.comm.sockets import Sockets
from shoal.launch import join

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
TIMEOUT = timedelta(minutes=5)

Allocate = Callable[[int], Tensor]
"""Makes a tensor of so many fp32 zeros, in memory that has been written to."""


@dataclass(frozen=True)
class Carrier:
    """One contender: how to build its step, its note, and the operations that it has."""

    build: Build
    note: str
    operations: tuple[str, ...] = OPERATIONS


@dataclass(frozen=True)
class Buffers:
    """What an operation works on; `out` is `flat` itself where it works in place."""

    flat: Tensor
    out: Tensor


def private(numel: int) -> Tensor:
    """In the process's own memory. Filled after the fact: fresh zeros would be one shared page of zeros until
    written."""
    return torch.empty(numel).fill_(0.0)


def buffers(allocate: Allocate, size: int, operation: str, num_bytes: int) -> Buffers:
    """The tensors of one rank of `size`; the large ones by `allocate`."""
    numel = num_bytes // torch.float32.itemsize
    whole = allocate(numel)
    if operation == "reduce_scatter":
        return Buffers(whole, private(numel // size))
    if operation == "all_gather":
        return Buffers(private(numel // size), whole)
    if operation == "all_to_all":
        return Buffers(whole, allocate(numel))
    return Buffers(whole, whole)


def shm() -> Step:
    """Shoal's shared memory; what is exchanged lies in the ranks' own memory and is copied in and out."""
    group = Group.of(_shared())
    return _through(group, private)


def segment() -> Step:
    """Shoal's shared memory, and the large tensor lies in it: gradient and parameter chunks can live there."""
    shared = _shared()

    def allocate(numel: int) -> Tensor:
        flat = shared.allocate(numel, torch.float32)
        if flat is None:
            raise RuntimeError(
                f"no shared memory for {numel} fp32 numbers a rank: make /dev/shm larger, or leave large sizes out"
            )
        return flat

    return _through(Group.of(shared), allocate)


def sockets() -> Step:
    """Shoal's transport between hosts, TCP connections of its own, here on loopback."""
    world = join()
    assert world.store is not None
    return _through(Group.of(Sockets(world.store, world.rank, world.size, loopback=True, timeout=TIMEOUT)), private)


def gloo() -> Step:
    """torch.distributed on gloo, as anybody calls it."""
    dist.init_process_group("gloo")
    of_case = lru_cache(maxsize=1)(partial(buffers, private, dist.get_world_size()))
    calls: dict[str, Callable[[Buffers], object]] = {
        "all_reduce": lambda b: dist.all_reduce(b.flat),
        "reduce_scatter": lambda b: dist.reduce_scatter_single(b.out, b.flat),
        "all_gather": lambda b: dist.all_gather_single(b.out, b.flat),
        "all_to_all": lambda b: dist.all_to_all_single(b.out, b.flat),
        "broadcast": lambda b: dist.broadcast(b.flat, 0),
    }
    return lambda operation, num_bytes: calls[operation](of_case(operation, num_bytes))


CARRIERS: dict[str, Carrier] = {
    "gloo": Carrier(gloo, "torch.distributed on gloo, loopback"),
    "our sockets": Carrier(sockets, "Shoal between hosts: TCP connections of its own"),
    "shm": Carrier(shm, "Shoal's shared memory, tensors in the ranks' own memory"),
    "in the segment": Carrier(
        segment, "the same, the large tensor in shared memory", ("all_reduce", "reduce_scatter", "all_gather")
    ),
}


def _shared() -> Shared:
    world = join()
    assert world.store is not None
    shared = Shared.open(world.store, world.rank, world.size, TIMEOUT)
    if shared is None:
        raise RuntimeError("no shared memory between the ranks (the warning above says why)")
    return shared


def _through(group: Group, allocate: Allocate) -> Step:
    of_case = lru_cache(maxsize=1)(partial(buffers, allocate, group.size))
    calls: dict[str, Callable[[Buffers], object]] = {
        "all_reduce": lambda b: group.all_reduce(b.flat),
        "reduce_scatter": lambda b: group.reduce_scatter(b.out, b.flat),
        "all_gather": lambda b: group.all_gather(b.out, b.flat),
        "all_to_all": lambda b: group.all_to_all(b.out, b.flat),
        "broadcast": lambda b: group.broadcast(b.flat),
    }
    return lambda operation, num_bytes: calls[operation](of_case(operation, num_bytes))

"""How ranks come to be: found in the environment, or started on this host."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist

from shoal.comm.stalls import to_stderr
from shoal.comm.world import World
from shoal.launch.environment import MPI, SLURM, Identity, discover
from shoal.launch.local import launch
from shoal.launch.store import connect, locate

__all__ = ["Identity", "connect", "discover", "join", "launch", "locate"]


def join(init: str | None = None, *, timeout: float = 300.0) -> World:
    """A World of the ranks that this process belongs to, by `init` or the environment (see `environment`).

    Waits until every rank has come. Each call makes a World with groups and keys of its own; the ranks must make them in the same
    order. Raises UserError for variables that are wrong, LaunchError if the ranks do not meet within `timeout` seconds.
    """
    arrival = _arrive(discover(os.environ, init), timeout)
    identity, store = arrival.identity, arrival.store
    assert identity.local_rank is not None and identity.local_size is not None
    scheduler = identity.source in {names.source for names in (*MPI, SLURM)}
    own_gpu = scheduler and identity.local_size > 1 and torch.cuda.is_available() and torch.cuda.device_count() == 1
    return World(
        identity.rank,
        identity.size,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        store=dist.PrefixStore(f"world{next(arrival.worlds)}", store) if store is not None else None,
        generation=identity.generation,
        device="cuda:0" if own_gpu else None,  # a scheduler that gives each task a GPU shows it as the first one
        say=to_terminal if "SHOAL_TERMINAL" in os.environ else to_stderr,
    )


def to_terminal(line: str) -> None:
    """Where the person sees it who started the ranks, whose own output may go to files: the launcher's stderr, which it left open for them."""
    with suppress(OSError):
        os.write(int(os.environ["SHOAL_TERMINAL"]), f"{line}\n".encode())


@dataclass(frozen=True)
class _Arrival:
    """This process at its store, and the count of the Worlds made there."""

    identity: Identity
    store: dist.Store | None
    worlds: Iterator[int]


@cache
def _arrive(identity: Identity, timeout: float) -> _Arrival:
    """Once a process: a rank that comes a second time is taken for another process with the same rank."""
    store = connect(identity, timeout)
    return _Arrival(locate(identity, store), store, itertools.count())

"""Ranks: found in the environment that a launcher set up, or started on this host."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist

from shoal.comm.stalls import to_stderr
from shoal.comm.world import Seat, World
from shoal.device import accelerators
from shoal.errors import UserError
from shoal.launch import mpi, slurm
from shoal.launch.environment import RAY, discover
from shoal.launch.identity import Identity
from shoal.launch.local import launch
from shoal.launch.store import connect, connect_placed, locate

__all__ = ["Identity", "connect", "discover", "enter", "join", "launch"]


def join(init: str | None = None, *, timeout: float = 300.0) -> World:
    """Returns a World of the ranks that this process belongs to, once every rank has come.

    init: the address of a store (see `environment`); by default the environment decides.
    timeout: seconds to wait for the other ranks.

    Each call makes a World with groups and keys of its own, so all ranks must call in the same order. Raises UserError
    for invalid variables and in an evaluator, LaunchError if the ranks do not meet in time.
    """
    place = discover(os.environ, init)
    if place.evaluates:
        raise UserError(
            "TF_CONFIG says that this is the evaluator, which is none of the ranks. `shoal train job.toml` evaluates "
            "the checkpoints of a run here; a script of your own goes another way before it makes an engine, or gives "
            "it world=shoal.comm.World.single()."
        )
    if place.serves is not None:
        raise UserError(
            f"TF_CONFIG says that this is parameter server {place.serves}, which is none of the ranks. `shoal train "
            "job.toml` serves the workers of a job here; a script of your own makes a shoal.ParameterServer."
        )
    arrival = _arrive(place, timeout)
    identity, store = arrival.identity, arrival.store
    assert identity.local_rank is not None and identity.local_size is not None
    scheduler = identity.source in {RAY, *(names.source for names in (*mpi.NAMES, slurm.NAMES))}
    found = accelerators() if scheduler and identity.local_size > 1 else []
    return World(
        identity.rank,
        identity.size,
        seat=Seat(identity.local_rank, identity.local_size),
        store=dist.PrefixStore(f"world{next(arrival.worlds)}", store) if store is not None else None,
        generation=identity.generation,
        device=found[0] if len(found) == 1 else None,  # where a scheduler gives each task a GPU, that is the first one
        say=to_terminal if "SHOAL_TERMINAL" in os.environ else to_stderr,
    )


def enter(identity: Identity, secret: bytes, check: Callable[[], None]) -> World:
    """Returns a World of ranks that supervisors have placed (see connect_placed)."""
    assert identity.local_rank is not None and identity.local_size is not None
    store = connect_placed(identity, secret, check)
    seat = Seat(identity.local_rank, identity.local_size)
    return World(identity.rank, identity.size, seat=seat, store=store, generation=identity.generation, say=to_terminal)


def to_terminal(line: str) -> None:
    """Writes `line` to the launcher's stderr, which the ranks inherit; their own output may go to files."""
    with suppress(OSError):
        os.write(int(os.environ["SHOAL_TERMINAL"]), f"{line}\n".encode())


@dataclass(frozen=True)
class _Arrival:
    """The identity of this process, its store, and a counter of the Worlds made there."""

    identity: Identity
    store: dist.Store | None
    worlds: Iterator[int]


@cache
def _arrive(identity: Identity, timeout: float) -> _Arrival:
    """Connects to the store, once per process: a second connection would count as another process with this rank."""
    store = connect(identity, timeout)
    return _Arrival(locate(identity, store), store, itertools.count())

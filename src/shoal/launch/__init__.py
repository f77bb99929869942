"""How ranks come to be: found in the environment, or started on this host."""

from __future__ import annotations

import os

from shoal.comm.world import World
from shoal.launch.environment import Identity, discover
from shoal.launch.local import launch
from shoal.launch.store import connect, locate

__all__ = ["Identity", "connect", "discover", "join", "launch", "locate"]


def join(init: str | None = None, *, timeout: float = 300.0) -> World:
    """The World that this process belongs to, by `init` or the environment (see `environment`), once every rank has come.

    Raises UserError for variables that are wrong, LaunchError if the ranks do not meet within `timeout` seconds.
    """
    identity = discover(os.environ, init)
    store = connect(identity, timeout)
    placed = locate(identity, store)
    assert placed.local_rank is not None and placed.local_size is not None
    return World(
        placed.rank,
        placed.size,
        local_rank=placed.local_rank,
        local_size=placed.local_size,
        store=store,
        generation=placed.generation,
    )

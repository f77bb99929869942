"""The script of the doctor's two ranks, python -m shoal.cli.two_ranks RESULT: measures their links."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.comm import Group, World, link_of
from shoal.comm.sockets import Sockets
from shoal.launch import join

TIMEOUT = timedelta(seconds=60)


def main(result: Path) -> None:
    """Checks an all-reduce of 1 MiB, then measures the link of the world's group and a TCP link.

    result: the file that rank 0 writes the links to, as JSON.
    Raises AssertionError where the sum is wrong.
    """
    world = join(timeout=TIMEOUT.total_seconds())
    total = world.everyone.all_reduce(torch.ones(2**18, device=world.device))
    assert bool((total == world.size).all()), f"{world.size} ones sum to {total.unique().tolist()}"
    links = [link_of(world.everyone, world.device), link_of(_sockets(world), torch.device("cpu"))]
    if world.rank == 0:
        result.write_text(json.dumps([asdict(link) for link in links]))


def _sockets(world: World) -> Group:
    assert world.store is not None
    transport = Sockets(dist.PrefixStore("doctor", world.store), world.rank, world.size, loopback=True, timeout=TIMEOUT)
    return Group.of(transport, "loopback")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

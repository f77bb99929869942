"""Ranks meet over tcp:// and file://, and the messages when they do not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.comm.world import World
from shoal.errors import LaunchError
from shoal.launch import join
from shoal.launch.identity import SINGLE, Identity
from shoal.launch.store import connect, locate
from tests.pool import run_ranks

HOST = socket.gethostname()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def at(port: int, rank: int, size: int, generation: int = 0, rank0_serves: bool = True) -> Identity:
    return Identity(rank, size, None, None, f"tcp://127.0.0.1:{port}", generation, "a test", rank0_serves)


def joined_sum(place: World, init: str) -> tuple[float, int, int, int, float]:
    rank, size = place.rank, place.size
    world = join(f"{init}?rank={rank}&size={size}", timeout=30)
    second = join(f"{init}?rank={rank}&size={size}", timeout=30)
    total = world.everyone.all_reduce(torch.tensor(float(rank)))
    again = second.everyone.all_reduce(torch.tensor(1.0))
    return float(total), world.local_rank, world.local_size, world.size, float(again)


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_join_by_url_find_their_places_and_may_make_two_worlds(scheme: str, tmp_path: Path) -> None:
    init = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/deep/store"
    assert run_ranks(joined_sum, 3, init) == [(3.0, rank, 3, 3, 3.0) for rank in range(3)]


@pytest.mark.fast
def test_a_single_process_needs_no_store() -> None:
    assert connect(SINGLE) is None
    assert locate(SINGLE, None) == SINGLE


@pytest.mark.fast
def test_missing_ranks_are_named() -> None:
    with pytest.raises(
        LaunchError, match=rf"rank 0 of 4 on {HOST} waited 1 s at tcp://127.0.0.1:\d+; missing: rank 1-3\."
    ):
        connect(at(free_port(), 0, 4), timeout=1.0)


@pytest.mark.fast
def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            LaunchError, match=rf"rank 0 on {HOST}: port {port} cannot be opened .* choose another MASTER_PORT"
        ):
            connect(at(port, 0, 2), timeout=5.0)


@pytest.mark.fast
def test_a_name_of_rank_0_that_leads_nowhere() -> None:
    lost = replace(at(free_port(), 0, 2), store_url=f"tcp://node1.invalid:{free_port()}")
    with pytest.raises(LaunchError, match=r"node1.invalid is no name of this host .* Set MASTER_ADDR on every rank"):
        connect(lost, timeout=0.5)


@pytest.mark.fast
def test_nobody_listens() -> None:
    port = free_port()
    message = (
        rf"rank 1 of 2 on {HOST} did not reach the store at 127.0.0.1:{port} within 1 s .*refused.* Check that rank 0 "
        r"runs there"
    )
    with pytest.raises(LaunchError, match=message):
        connect(at(port, 1, 2), timeout=1.0)


def test_a_listener_that_never_answers() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(LaunchError, match=r"listens but is no store of this run .*choose another MASTER_PORT"):
            connect(at(other.getsockname()[1], 1, 2), timeout=2.0)


@pytest.mark.fast
def test_two_processes_with_the_same_rank() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(LaunchError, match="missing: rank 1"):
        connect(at(server.port, 0, 2, rank0_serves=False), timeout=1.0)
    with pytest.raises(LaunchError, match="rank 0 came twice"):
        connect(at(server.port, 0, 2, rank0_serves=False), timeout=1.0)


@pytest.mark.fast
def test_a_file_that_cannot_be_made() -> None:
    with pytest.raises(LaunchError, match="rank 0: the store file /proc/none/store cannot be opened"):
        connect(Identity(0, 2, None, None, "file:///proc/none/store", 0, "a test"), timeout=1.0)


@pytest.mark.fast
def test_a_generation_does_not_see_the_keys_of_another() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores: dict[tuple[int, int], dist.Store | None] = {}

    def arrive(rank: int, generation: int) -> None:
        stores[rank, generation] = connect(at(server.port, rank, 2, generation, rank0_serves=False), timeout=20.0)

    threads = [threading.Thread(target=arrive, args=(rank, generation)) for rank in (0, 1) for generation in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0, 0].set("key", "value")
    assert stores[1, 0].get("key") == b"value"
    assert not stores[1, 1].check(["key"])


LONG = 480.0
"""Seconds, of which half are more than two ranks take on any machine."""
LEAVES = """
import os, sys, time
import torch
from shoal.launch import join, store
store.PARTING_SECONDS = float(sys.argv[1])
world = join()
if world.rank == 1:
    time.sleep(1.0)
    if sys.argv[2] == "killed":
        os._exit(1)
    world.store.set("late", "1")
    print(world.store.get("late").decode())
elif sys.argv[2] == "failed":
    raise RuntimeError("rank 0 failed")
"""


def ending(seconds: float, how: str) -> list[tuple[int, str]]:
    """What each of two ranks ended with and said, where rank 0 waits for the other at most so many `seconds`."""
    port, ranks = free_port(), []
    for rank in range(2):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", LEAVES, str(seconds), how]
        ranks.append(
            subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        )
    try:
        said = [rank.communicate(timeout=LONG / 2)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]


def test_the_rank_that_has_the_store_ends_last() -> None:
    """Else a rank that is slower finds no store, say at the end of a save."""
    assert ending(LONG, "late") == [(0, ""), (0, "1\n")]


def test_a_rank_that_was_killed_or_an_error_does_not_hold_the_store_back() -> None:
    assert ending(0.5, "killed")[0] == (0, "")
    assert ending(LONG, "failed")[0][0] == 1

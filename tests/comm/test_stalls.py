"""A rank that stops or is late is named after a few seconds, the rank itself goes on, and that is said too."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.comm import Seat, World, stalls
from shoal.comm.stalls import Calls
from tests.pool import apart, disposable_ranks, make_world, run_ranks

pytestmark = pytest.mark.alone


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name} has not come"
        time.sleep(0.05)


def lines_of(world: World, tmp: str, on_sockets: bool, message: bool) -> list[str]:
    """What this rank says while rank 1 is stopped by the test in the middle of a loop of collectives, or rank 0 waits
    for its message. A file tells of each line that it is said."""
    stalls.STALL_SECONDS, stalls.SIGN_SECONDS, stalls._LOOK_SECONDS = 1.0, 0.2, 0.1
    world = apart(world) if on_sockets else make_world(world.rank, world.size, world.store)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        (Path(tmp) / f"rank{world.rank}-line{len(said)}").touch()

    world._stalls._say = say
    group, flat = world.everyone, torch.ones(1000)
    group.barrier()
    if message:
        if world.rank == 1:
            wait_for(Path(tmp) / "rank0-line1")
            group.send(flat, 0, "activations")
        elif world.rank == 0:
            group.recv(flat, 1, "activations")
    else:
        (Path(tmp) / str(world.rank)).touch()
        while float(group.all_reduce(flat.fill_(float((Path(tmp) / "end").exists())), "min", "gradients")[0]) == 0:
            pass
    time.sleep(0.5)
    return said


@pytest.mark.parametrize("on_sockets", [False, True], ids=["shared memory", "sockets"])
def test_a_stopped_rank_is_named_once_and_its_return_is_said(on_sockets, tmp_path):
    with disposable_ranks(lines_of, 3, str(tmp_path), on_sockets, False) as ranks:
        for rank in range(3):
            wait_for(tmp_path / str(rank))
        os.kill(ranks[1].pid, signal.SIGSTOP)
        wait_for(tmp_path / "rank0-line1")
        os.kill(ranks[1].pid, signal.SIGCONT)
        wait_for(tmp_path / "rank0-line2")
        (tmp_path / "end").touch()
        first, stopped, third = [rank.result(30) for rank in ranks]
    assert len(first) == 2 and stopped == [] and third == []
    assert first[0].startswith("shoal: rank 0 has waited 1 s in all_reduce (gradients), collective ") and first[
        0
    ].endswith(", for rank 1")
    assert "of group world goes on after" in first[1]


def test_a_message_that_does_not_come_is_said(tmp_path):
    with disposable_ranks(lines_of, 2, str(tmp_path), False, True) as ranks:
        waiting, late = [rank.result(30) for rank in ranks]
    assert late == [] and waiting[0] == "shoal: rank 0 has waited 1 s in recv (activations), group world, for rank 1"
    assert "goes on after" in waiting[1] and len(waiting) == 2


class Stopped(dist.Store):  # type: ignore[misc]
    """A store whose host does not answer."""

    def set(self, key: str, value: str) -> None:
        time.sleep(3)

    def check(self, keys: list[str]) -> bool:
        time.sleep(3)
        return False


@pytest.mark.fast
def test_a_store_that_does_not_answer_does_not_keep_the_line_back(monkeypatch):
    monkeypatch.setattr(stalls, "_STORE_SECONDS", 0.1)
    calls, said = Calls("world", 1, [0, 1], Stopped()), []
    call = calls.begin("barrier", 3, None)
    call.started -= 7
    calls.look(said.append)
    assert said == [
        "shoal: rank 1 has waited 7 s in barrier, collective 3 of group world, for others (the store does not answer)"
    ]


@pytest.mark.fast
def test_when_all_have_come_nothing_is_said_and_a_failure_does_not_go_on():
    store, said = dist.HashStore(), []
    ranks = [Calls("world", rank, [4, 5], store) for rank in range(2)]
    calls = [each.begin("all_reduce", 1, None) for each in ranks]
    calls[0].started -= 2
    ranks[0].look(said.append)  # signs
    calls[1].started -= 7
    ranks[1].look(said.append)
    assert said == []
    ranks[1].end()
    late = ranks[1].begin("all_reduce", 2, None)
    late.started -= 7
    ranks[1].look(said.append)
    late.failed = True
    ranks[1].end()
    ranks[1].look(said.append)
    assert said == ["shoal: rank 5 has waited 7 s in all_reduce, collective 2 of group world, for rank 4"]


def patience(world: World) -> tuple[float, float, int]:
    """Of a world whose maker names no time: how long operations wait, how long connecting does, and after how many idle
    seconds a host is asked for."""
    world = World(
        world.rank,
        world.size,
        store=world.store,
        seat=Seat(host_id=f"host {world.rank}"),
        device="cpu",
        say=lambda line: None,
    )
    mesh = world.everyone.transports["cpu"]._mesh  # type: ignore[attr-defined]
    (connection, *_) = mesh._peers.values()
    return mesh._timeout, mesh._meeting_seconds, connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)


def test_a_rank_that_lives_is_waited_for_and_a_host_that_is_gone_is_found_out():
    assert run_ranks(patience, 2) == [(24 * 3600, 600, 30)] * 2


@pytest.mark.fast
def test_its_thread_ends_with_the_world():
    before = threading.active_count()
    watcher = stalls.Stalls()
    watcher.watch("world", 0, [0, 1], None)
    assert threading.active_count() == before + 1
    watcher.close()
    assert threading.active_count() == before

"""A store whose server has stopped holds up nobody: neither a question with a limit, nor a world that closes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from shoal.comm import Seat, World
from shoal.comm.roll_call import RollCall
from shoal.comm.unanswered import ask
from tests.pool import disposable_ranks


def serve(world: World, tmp: str) -> None:
    """Serves a store until the test kills this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (Path(tmp) / "port.part").write_text(f"{store.port} {os.getpid()}")
    (Path(tmp) / "port.part").rename(Path(tmp) / "port")
    time.sleep(60)


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[dist.Store]:
    """A client of a store whose server has stopped, which keeps a thread of this process already waiting."""
    with disposable_ranks(serve, 1, str(tmp_path)):
        while not (tmp_path / "port").exists():
            time.sleep(0.01)
        port, pid = map(int, (tmp_path / "port").read_text().split())
        store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20), wait_for_workers=False)
        store.set("here", "1")
        process = psutil.Process(pid)
        process.suspend()
        while any(psutil.Process(thread.id).status() != psutil.STATUS_STOPPED for thread in process.threads()):
            time.sleep(0.001)  # a thread that computes stops only when it hears of the signal
        assert not ask(lambda: store.check(["here"]), 0.05)
        yield store
        process.kill()


def test_a_question_is_answered_in_time_or_not():
    seen = list[int]()
    assert ask(lambda: seen.append(1), 5.0) and seen == [1]
    began = time.monotonic()
    assert not ask(lambda: time.sleep(1.0), 0.1)
    assert time.monotonic() - began < 0.5


def test_what_a_store_refuses_is_answered():
    def refused() -> None:
        raise RuntimeError("the server is gone")

    assert ask(refused, 5.0)


@pytest.mark.parametrize("name", ["a world closes", "a world closes again", "a failed group asks who is missing"])
def test_a_server_that_has_stopped_holds_up_nobody(stopped, name):
    world = World(0, 2, seat=Seat(0, 2, "here"), store=stopped)
    if name == "a failed group asks who is missing":
        roll = RollCall(world.store, 0, [0, 1], lambda rank: False)
        asked, most, wants = lambda: roll.call(3), 1.5, "does not answer"
    elif name == "a world closes":
        asked, most, wants = lambda: world.close(), 1.0, "None"
    else:
        world.close()
        asked, most, wants = lambda: world.close(), 0.1, "None"
    began = time.monotonic()
    assert wants in str(asked())
    assert time.monotonic() - began < most

"""Updates that run beside the next forward: who waits for which, and who is told what went wrong."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.comm.lane import Lane
from shoal.comm.ledger import Ledger
from shoal.comm.silent import AtOnce
from shoal.optim.tiers.deferred_update import DeferredUpdate

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
CHUNKS: list[Any] = [SimpleNamespace(index=index) for index in range(3)]


def test_a_chunk_waits_for_its_own_update_alone():
    go_on, ended = threading.Event(), list[int]()

    def updates() -> Iterator[Any]:
        for chunk in reversed(CHUNKS):
            if chunk.index == 0:
                go_on.wait()
            ended.append(chunk.index)
            yield chunk
        ended.append(-1)

    deferred = DeferredUpdate(Lane(CPU))
    deferred.start(CHUNKS, updates())
    deferred.wait_for(CHUNKS[1])
    assert ended == [2, 1], "the third is not awaited"
    deferred.wait_for(SimpleNamespace(index=9))  # type: ignore[arg-type]  # of no chunk that is updated so
    go_on.set()
    deferred.wait_for(CHUNKS[0])
    deferred.settle()
    assert ended == [2, 1, 0, -1], "what comes after the last update has run too"
    deferred.close()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_update_that_fails_at_once_is_told_where_it_begins(number):
    """It was said that an index is out of range, when the engine was closed."""

    def updates() -> Iterator[Any]:
        yield from CHUNKS[:number]
        raise OSError("the disk is full")

    deferred = DeferredUpdate(AtOnce(CPU, Ledger()))
    with pytest.raises(OSError, match="full"):
        deferred.start(CHUNKS, updates())
    deferred.settle()
    deferred.close()


ENDS = """
import torch
from types import SimpleNamespace
from shoal.comm.lane import Lane
from shoal.optim.tiers.deferred_update import DeferredUpdate
def updates():
    weight = torch.zeros(2**20)
    for chunk in chunks:
        for _ in range(300):
            weight.add_(1.0)
        yield chunk
    print("all are updated")
chunks = [SimpleNamespace(index=index) for index in range(3)]
DeferredUpdate(Lane(torch.device("cpu"))).start(chunks, updates())
"""


def test_a_process_that_ends_meanwhile_ends_well():
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout.strip()) == (0, "all are updated"), ended.stderr


@pytest.mark.parametrize("lane", [Lane, AtOnce])
def test_the_updates_of_the_next_step_follow(lane):
    deferred, ended = DeferredUpdate(lane(CPU, Ledger())), list[int]()
    for _ in range(2):
        deferred.start(CHUNKS, (ended.append(chunk.index) or chunk for chunk in CHUNKS))
    deferred.settle()
    assert ended == [0, 1, 2] * 2
    deferred.close()


@pytest.mark.parametrize("number", [1, 3])
def test_what_went_wrong_is_told_each_time(number):
    """Also what does behind the last update, as a page is written."""
    first = threading.Event()

    def updates() -> Iterator[Any]:
        yield from CHUNKS[:number]
        first.wait()
        raise OSError("the disk is full")

    deferred = DeferredUpdate(Lane(CPU))
    deferred.start(CHUNKS, updates())
    deferred.wait_for(CHUNKS[0])
    first.set()
    with pytest.raises(OSError, match="full"):
        deferred.settle()
    for chunk in CHUNKS * 2:
        with pytest.raises(OSError, match="full"):
            deferred.wait_for(chunk)
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            deferred.settle()
    with pytest.raises(OSError, match="full"):
        deferred.start(CHUNKS, iter(CHUNKS))
    deferred.close()

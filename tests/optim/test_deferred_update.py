"""Updates that run beside the next forward: who waits for which, and who is told what went wrong."""

from __future__ import annotations

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


@pytest.mark.parametrize("lane", [Lane, AtOnce])
def test_the_updates_of_the_next_step_follow(lane):
    deferred, ended = DeferredUpdate(lane(CPU, Ledger())), list[int]()
    for _ in range(2):
        deferred.start(CHUNKS, (ended.append(chunk.index) or chunk for chunk in CHUNKS))
    deferred.settle()
    assert ended == [0, 1, 2] * 2
    deferred.close()


def test_what_went_wrong_is_told_each_time():
    def updates() -> Iterator[Any]:
        yield CHUNKS[0]
        raise OSError("the disk is full")

    deferred = DeferredUpdate(Lane(CPU))
    deferred.start(CHUNKS, updates())
    deferred.wait_for(CHUNKS[0])
    for chunk in CHUNKS[1:] * 2:
        with pytest.raises(OSError, match="full"):
            deferred.wait_for(chunk)
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            deferred.settle()
    with pytest.raises(OSError, match="full"):
        deferred.start(CHUNKS, iter(CHUNKS))
    deferred.close()

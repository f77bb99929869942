"""What ranks send their buddies comes as it was: in memory of both where they are on one host, else as messages."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.buddy import ring as rings
from shoal.checkpoint.buddy import room as rooms
from shoal.checkpoint.buddy.ring import PURPOSE, Ring
from shoal.checkpoint.buddy.room import OpenFile, Room, Shape, opened
from shoal.comm import World
from shoal.errors import LaunchError
from tests.pool import run_ranks

TURNS, ROOMS = 4, 2


def _shapes(told: Sequence[int]) -> list[Shape]:
    """Of what rank `told[0]` sends: the last of four ranks has nothing."""
    floats = (torch.Size([5 + told[0]]), torch.float32)
    return [floats, (torch.Size([2, 3]), torch.bfloat16), (torch.Size([]), torch.float32)] if told[0] < 3 else []


def _values(told: Sequence[int]) -> list[Tensor]:
    return [torch.full(shape, 10.0 * told[1] + told[0], dtype=dtype) for shape, dtype in _shapes(told)]


def _delivers(world: World, hosts: str) -> tuple[int, list[str]]:
    """How many pieces of memory this rank has in common with others; what was wrong. Rooms are taken by turns."""
    group = world.everyone
    gc.collect()
    files, mapped, before = _files(), _mapped(), world.ledger.total(purpose=PURPOSE).wire
    ring, wrong = Ring(group, hosts[world.rank]), list[str]()
    used, at = dict[int, Room](), dict[int, list[int]]()
    for turn in range(TURNS):
        mine, number = [world.rank, turn], turn % ROOMS
        told, used[number] = ring.deliver(mine, _values(mine), _shapes, used.get(number))
        places = [each.data_ptr() for each in used[number].theirs]
        if told != [ring.ward, turn] or not all(map(torch.equal, used[number].theirs, _values(told))):
            wrong.append(f"turn {turn}: {told} with {used[number].theirs}")
        if at.setdefault(number, places) != places:
            wrong.append(f"turn {turn} is not where its room was")
        ring.confirm()
    sent = world.ledger.total(purpose=PURPOSE).wire - before
    nbytes = TURNS * sum(each.nbytes for each in _values([world.rank, 0]))
    if not nbytes <= sent <= nbytes + TURNS * 1024:
        wrong.append(f"{sent} bytes are booked for {nbytes}")
    common = _mapped() - mapped
    used.clear()
    if _mapped() != mapped or _files() != files:
        wrong.append("something is open that nobody uses any more")
    return common, wrong


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:shoal")


@pytest.mark.parametrize(
    ("hosts", "common"),
    [
        ("aa", [2, 2]),
        ("ab", [0, 0]),
        ("aab", [1, 1, 0]),  # 1 -> 0 is the only way that stays on a host
        ("aaaa", [1, 2, 2, 1]),  # the last one has nothing to send
        ("aaab", [1, 2, 1, 0]),
    ],
)
def test_what_is_delivered_is_what_was_sent(hosts, common):
    for (found, wrong), expected in zip(run_ranks(_delivers, len(hosts), hosts), common, strict=True):
        assert wrong == [] and found == ROOMS * expected


def _refuses(error: Exception) -> Any:
    def call(*_: object) -> None:
        raise error

    return call


def _without(world: World, name: str, error: Exception) -> tuple[int, list[str]]:
    """What `_delivers` finds where the first of three ranks cannot do something."""
    if world.rank:
        return _delivers(world, "aaa")
    with patch.object(rooms, name, _refuses(error)):
        return _delivers(world, "aaa")


@pytest.mark.parametrize(
    ("name", "error", "common"),
    [
        ("nameless", OSError("not permitted"), [1, 1, 2]),  # 0 -> 1 has none
        ("opened", RuntimeError("unable to open file"), [1, 2, 1]),  # 2 -> 0 has none
    ],
)
def test_a_rank_that_cannot_have_memory_with_another_sends_messages(name, error, common):
    for (found, wrong), expected in zip(run_ranks(_without, 3, name, error), common, strict=True):
        assert wrong == [] and found == ROOMS * expected


def _is_gone(world: World) -> str:
    """What is said where rank 0 has ended by the time when rank 1 opens its memory."""
    ring, told = Ring(world.everyone, "a"), [world.rank, 0]

    def found(place: OpenFile, shapes: Sequence[Shape]) -> list[Tensor]:
        return opened(place if world.rank == 0 or place.pid == os.getpid() else OpenFile(0, 0), shapes)

    with patch.object(rings, "opened", found), pytest.raises(LaunchError) as error:
        ring.deliver(told, _values(told), _shapes, None)
    world.close()
    return str(error.value)


def test_a_ward_that_has_ended_is_an_error_of_the_launch():
    assert "rank 1: what rank 0 has written cannot be opened: " in run_ranks(_is_gone, 2)[1]


def _confirms(world: World) -> bool:
    """Whether rank 1 had let go of what it kept when rank 0 went on."""
    ring, key = Ring(world.everyone, "a"), "let go"
    assert world.store is not None
    if world.rank == 1:
        time.sleep(0.2)
        world.store.set(key, "")
    ring.confirm()
    return world.store.check([key])


def test_a_rank_writes_again_when_its_buddy_has_let_go():
    assert run_ranks(_confirms, 2)[0]

"""The device of a world, and which ranks meet in one."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.comm import World
from shoal.comm.reaches import hosts_of
from shoal.comm.world import Seat
from shoal.device import stand_in
from shoal.errors import LaunchError, UserError
from tests.device.recorder import Recorder
from tests.pool import run_ranks


@pytest.mark.parametrize(("device", "index"), [("cuda", 1), ("cuda:0", 0)])
def test_a_device_without_an_index_is_the_one_that_is_current(device, index):
    with stand_in("cuda", Recorder()):
        world = World.single(device)
        assert world.device == torch.device("cuda", index)


def worlds(*devices: str) -> list[str]:
    """What the worlds of ranks with these devices say as they meet."""
    store = dist.HashStore()

    def meet(rank: int) -> str:
        world = World(rank, len(devices), seat=Seat(rank, len(devices)), store=store, device=devices[rank])
        try:
            world.group("world", list(range(len(devices))))
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(devices)) as threads:
        return list(threads.map(meet, range(len(devices))))


def test_who_waits_for_a_rank_that_has_closed_its_groups_is_told():
    """In a store, to make a group with it."""
    store, said = dist.HashStore(), list[str]()
    first, second = (World(rank, 2, seat=Seat(rank, 2), store=store, device="cpu") for rank in range(2))

    def wait() -> None:
        try:
            first.group("late", [0, 1])
        except LaunchError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    second.close()
    thread.join(20)
    assert said == ["rank 0: group late cannot be made with rank 1: rank 1 has closed its groups"]


def test_a_world_that_nobody_has_any_more_is_gone_at_once():
    """Its groups hold shared memory, of which a collection of garbage knows nothing."""
    store = dist.HashStore()
    made = [World(rank, 2, seat=Seat(rank, 2), store=store, device="cpu") for rank in range(2)]
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lambda world: world.group("pair", [0, 1]).barrier(), made))
    known = list(map(weakref.ref, made))
    gc.disable()
    try:
        made.clear()
        assert [each() for each in known] == [None, None]
    finally:
        gc.enable()


def test_a_world_keeps_the_store_that_it_has_from_one_that_is_gone(tmp_path):
    first = World(store=dist.FileStore(str(tmp_path / "store"), 1))
    second = World(store=dist.PrefixStore("within", first.store))
    del first
    gc.collect()
    second.store.set("key", "value")
    assert second.store.get("key") == b"value"


def test_ranks_with_devices_of_several_kinds_are_told():
    with stand_in("cuda", Recorder()):
        said = worlds("cuda:0", "cpu")
    assert said[0] == said[1] and "rank 0 has cuda:0 and rank 1 has cpu: all ranks need the same kind" in said[0]


def test_ranks_with_the_same_gpu_are_told():
    """Whatever each process calls it: where a scheduler gives every task one GPU, all call theirs the first."""
    with stand_in("cuda", Recorder()):
        said = worlds("cuda:1", "cuda:1")
    assert said[0] == said[1] and "ranks 0 and 1 have the same GPU (GPU-1): give each its own" in said[0]


def _without(world: World) -> tuple[list[str], Any]:
    """What is refused, and who meets in the world of the ranks that are left."""
    world.everyone.barrier()
    said = []
    for wrong in ([], [world.rank], [3]):
        with pytest.raises(UserError) as error:
            world.without(wrong)
        said.append(str(error.value))
    if world.rank == 1:
        return said, None
    left = world.without([1])
    return said, (left.rank, left.size, left.local_size, left.everyone.all_gather_object(world.rank))


def test_the_ranks_that_are_left_meet_without_the_others():
    found = run_ranks(_without, 3)
    assert all("give the numbers of the ranks that have failed" in each for said, _ in found for each in said)
    assert [each for _, each in found] == [(0, 2, 2, [0, 2]), None, (1, 2, 2, [0, 2])]


@pytest.mark.parametrize(
    ("hosts", "on_host", "per_host"),
    [
        (["a"], [1], 1),
        (["a", "a", "a", "a"], [4, 4, 4, 4], 4),
        (["a", "a", "b", "b"], [2, 2, 2, 2], 2),
        (["a", "a", "a", "b"], [3, 3, 3, 1], 1),
        (["a", "b", "a", "b"], [2, 2, 2, 2], 1),
    ],
)
def test_a_host_is_told_by_what_it_is_whoever_has_started_its_ranks(hosts, on_host, per_host):
    """Two nodes of a job, or two agents of torchrun, on one host say each that theirs has a rank."""
    store = dist.HashStore()

    def meet(rank: int) -> tuple[int, int, int]:
        world = World(rank, len(hosts), seat=Seat(0, 1, hosts[rank]), store=store, device="cpu")
        found = world.on_host, world.per_host, hosts_of(world)[1]
        world.everyone.barrier()
        return found

    with ThreadPoolExecutor(len(hosts)) as threads:
        found = list(threads.map(meet, range(len(hosts))))
    assert found == [(number, per_host, per_host) for number in on_host]

"""Groups over several hosts: inside first, then across. The hosts are told to the ranks; all run on this one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.comm import Group, Seat, World, hierarchical
from shoal.comm.hierarchical import Hierarchical
from shoal.comm.shm import Shared
from tests.comm.operations import differing, every_operation, expected
from tests.pool import run_ranks


def world_on(world: World, hosts: str) -> World:
    """The same ranks, rank r on the host that is the r-th letter."""
    return World(
        world.rank,
        world.size,
        store=dist.PrefixStore(hosts, world.store),
        device="cpu",
        seat=Seat(host_id=hosts[world.rank]),
    )


def everything(
    world: World, hosts: str, dtype: torch.dtype, numel: int, small_bytes: int
) -> tuple[dict[str, torch.Tensor], str, str]:
    before, hierarchical.SMALL_BYTES = hierarchical.SMALL_BYTES, small_bytes
    try:
        spread = world_on(world, hosts)  # its end would close its groups
        transport = spread.everyone.transports["cpu"]
        inside = type(getattr(transport, "_inside", None)).__name__
        return every_operation(Group.of(transport), dtype, numel), type(transport).__name__, inside
    finally:
        hierarchical.SMALL_BYTES = before


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abba", "aaab", "abcc"])
@pytest.mark.parametrize("small_bytes", [0, 1 << 20], ids=["in cuts", "whole"])
def test_every_operation_on_integers_is_exact(hosts, small_bytes):
    """101 elements: not a multiple of the ranks of a host."""
    for rank, (got, kind, inside) in enumerate(run_ranks(everything, 4, hosts, torch.int64, 101, small_bytes)):
        assert kind == "Hierarchical" and inside == ("Shared" if hosts.count(hosts[rank]) > 1 else "Alone")
        assert differing(got, expected(rank, 4, torch.int64, 101)) == []


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
def test_floats_have_the_same_bits_on_every_rank_and_are_close_to_the_sum(hosts):
    results = [got for got, _, _ in run_ranks(everything, 4, hosts, torch.float32, 101, 0)]
    for rank, got in enumerate(results):
        want = expected(rank, 4, torch.float32, 101)
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)
        for op in ("sum", "avg", "min", "max", "product"):
            assert torch.equal(got[f"all_reduce {op}"], results[0][f"all_reduce {op}"])


def kinds(world: World) -> list[str]:
    """The transports of all ranks, of one host's, and of ranks of different hosts, and whether messages pass."""
    spread = world_on(world, "aabb")
    pair = [0, 1] if world.rank < 2 else [2, 3]
    across = [world.rank % 2, world.rank % 2 + 2]
    groups = [
        spread.everyone,
        spread.group("pair", pair),
        spread.group("across", across),
        spread.group("self", [world.rank]),
    ]
    assert [group.all_reduce(torch.ones(1)).item() for group in groups] == [4, 2, 2, 1]
    return [type(group.transports["cpu"]).__name__ for group in groups]


@pytest.mark.fast
def test_the_transport_follows_from_the_hosts_of_a_groups_ranks():
    assert run_ranks(kinds, 4) == [["Hierarchical", "Shared", "Sockets", "Alone"]] * 4


class Recorder:
    """A transport of `size` ranks that keeps what it was asked: how many bytes go which way."""

    def __init__(self, rank: int, size: int, name: str, calls: list[tuple[str, str, int]]) -> None:
        self.rank, self.size, self._name, self._calls = rank, size, name, calls

    def __getattr__(self, operation: str):
        def call(*args):
            large = max(arg.numel() for arg in args if isinstance(arg, torch.Tensor))
            self._calls.append((self._name, operation, large))

        return call


@pytest.mark.fast
def test_an_all_reduce_carries_only_a_ranks_cut_across():
    """40,000 floats on 2 x 2 ranks: 20,000 a rank go across; of 40,001 the last one goes apart."""
    calls: list[tuple[str, str, int]] = []
    inside, across, flat = (
        Recorder(0, size, name, calls) for name, size in (("inside", 2), ("across", 2), ("flat", 4))
    )
    transport = Hierarchical(0, [[0, 1], [2, 3]], inside, across, flat)
    transport.all_reduce(torch.ones(40_001), "sum")
    assert calls == [
        ("inside", "reduce_scatter", 40_000),
        ("across", "all_reduce", 20_000),
        ("inside", "all_gather", 40_000),
        ("inside", "all_reduce", 1),
        ("across", "all_reduce", 1),
    ]


def test_what_carries_ranks_without_shared_memory():
    assert run_ranks(without_memory, 2) == [("Sockets", 2.0)] * 2


def without_memory(world: World) -> tuple[str, float]:
    before, Shared.open = Shared.open, classmethod(lambda *_: None)
    try:
        group = world.everyone
        return type(group.transports["cpu"]).__name__, group.all_reduce(torch.ones(1)).item()
    finally:
        Shared.open = before

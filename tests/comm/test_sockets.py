"""Collectives over TCP: right for every dtype, in ring order bit by bit, and no byte more than the formula."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm import Group, sockets
from shoal.comm.sockets import Sockets
from shoal.comm.transport import sent_bytes
from tests.comm.operations import differing, draw, every_operation, expected, in_order, ops_of
from tests.pool import disposable_ranks, run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def connect(world) -> Sockets:
    return Sockets(dist.PrefixStore("sockets", world.store), world.rank, world.size, True, timedelta(seconds=20))


def on_sockets(world, dtype: torch.dtype, numel: int, piece_bytes: int) -> dict[str, torch.Tensor]:
    before, sockets.PIECE_BYTES = sockets.PIECE_BYTES, piece_bytes
    try:
        return every_operation(Group.of(connect(world)), dtype, numel)
    finally:
        sockets.PIECE_BYTES = before


def in_ring_order(rank: int, size: int, dtype: torch.dtype, numel: int) -> dict[str, torch.Tensor]:
    """As in rank order, but for what rings reduce: the cut of rank c is ((x[c+1] + x[c+2]) + ...) + x[c]."""
    want = expected(rank, size, dtype, numel)
    whole = [draw(other, size * numel, dtype).view(size, -1) for other in range(size)]
    for op in ops_of(dtype):
        want[f"reduce_scatter {op}"] = in_order([whole[(rank + k) % size][rank] for k in range(1, size + 1)], op)
    mine = [draw(other, numel, dtype) for other in range(size)]
    cut = -(-numel // size)
    turns = [[mine[(c + k) % size][c * cut : (c + 1) * cut] for k in range(1, size + 1)] for c in range(size)]
    want["all_reduce product"] = torch.cat([in_order(turn, "product") for turn in turns])
    return want


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_equals_the_reference(size, dtype):
    """Pieces of 64 bytes, so that a cut has several, the last one short. gloo's sums alone are compared with a tolerance."""
    results = run_ranks(on_sockets, size, dtype, 101, 64)
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 3e-3, torch.float32: 1e-6}.get(dtype, 1e-12)
    for rank, got in enumerate(results):
        want = in_ring_order(rank, size, dtype, 101)
        for name in {"all_reduce sum", "all_reduce avg"} & want.keys():
            torch.testing.assert_close(got[name], want.pop(name), rtol=tolerance, atol=2 * tolerance)
            got.pop(name)
        assert differing(got, want) == []


def sums(world, numel: int) -> list[torch.Tensor]:
    transport = connect(world)
    flats = [draw(world.rank, numel, dtype) for dtype in (torch.float32, torch.bfloat16)]
    for flat in flats:
        transport.all_reduce(flat, "avg")
    return flats


def test_sums_have_the_same_bits_on_every_rank():
    first, *others = run_ranks(sums, 3, 10_001)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def worst(world) -> list[float]:
    """The largest of [NaN, 1] and [2, NaN] and [0, 0]: NaN in both places."""
    rows = torch.tensor([[float("nan"), 1.0], [2.0, float("nan")], [0.0, 0.0]])
    flat = rows[world.rank].clone()
    connect(world).all_reduce(flat, "max")
    return flat.isnan().tolist()


@pytest.mark.fast
def test_the_largest_of_a_nan_is_a_nan():
    assert run_ranks(worst, 3) == [[True, True]] * 3


class Counting(Sockets):
    """Counts what it sends."""

    sent = 0

    def _isend(self, flat: torch.Tensor, dst: int):
        self.sent += flat.numel() * flat.element_size()
        return super()._isend(flat, dst)


def bytes_sent(world) -> dict[str, tuple[int, int]]:
    """By operation: the bytes sent, and those of the formula."""
    rank, size = world.rank, world.size
    transport = Counting(dist.PrefixStore("counting", world.store), rank, size, True, timedelta(seconds=20))
    cut, whole = torch.ones(300), torch.ones(300 * size)
    calls = {
        "all_reduce": lambda: transport.all_reduce(whole, "max"),
        "reduce_scatter": lambda: transport.reduce_scatter(cut, whole, "sum"),
        "all_gather": lambda: transport.all_gather(whole, cut),
        "all_to_all": lambda: transport.all_to_all(torch.empty_like(whole), whole, [300] * size, [300] * size),
        "scatter": lambda: transport.scatter(cut, whole, 1),
        "gather": lambda: transport.gather(whole, cut, 1),
    }
    counted = {}
    for operation, call in calls.items():
        transport.sent = 0
        call()
        counted[operation] = (transport.sent, sent_bytes(operation, 1200 * size, size, rank, 1))
    return counted


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rings_send_the_bytes_of_the_formula(size):
    for counted in run_ranks(bytes_sent, size):
        assert {operation: sent for operation, (sent, _) in counted.items()} == {
            operation: formula for operation, (_, formula) in counted.items()
        }


def receive_from_the_silent(world) -> tuple[str, float]:
    transport = Sockets(dist.PrefixStore("silent", world.store), world.rank, world.size, True, timedelta(seconds=1))
    if world.rank == 1:
        time.sleep(6)
    started = time.monotonic()
    try:
        transport.reduce_scatter(torch.empty(2), torch.ones(4), "sum")
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_a_late_rank_ends_in_an_error_after_the_timeout():
    with disposable_ranks(receive_from_the_silent, 2) as ranks:
        message, seconds = ranks[0].result()
    assert "imed out" in message and 0.9 < seconds < 5


def test_the_address_towards_a_store_on_loopback_is_none():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert sockets._address_towards(dist.PrefixStore("a", dist.PrefixStore("b", store))) is None
    assert sockets._address_towards(dist.HashStore()) is None


def use_after_close(world) -> str:
    transport = connect(world)
    transport.close()
    try:
        transport.barrier()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_closed_transport_says_so():
    assert run_ranks(use_after_close, 2) == ["the group has been closed"] * 2

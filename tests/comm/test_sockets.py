"""Collectives over TCP: right for every dtype, in rank order bit by bit, no byte more than the formula, an error where
a rank has gone."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.comm import Group, sockets, tcp
from shoal.comm.sockets import Sockets
from shoal.comm.transport import sent_bytes
from shoal.errors import LaunchError
from tests.comm.operations import differing, every_operation, expected
from tests.pool import disposable_ranks, run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def connect(world) -> Sockets:
    return Sockets(dist.PrefixStore("sockets", world.store), world.rank, world.size, True, timedelta(seconds=20))


def on_sockets(world, dtype: torch.dtype, numel: int, piece_bytes: int, compiled: bool) -> dict[str, torch.Tensor]:
    before, kernels = sockets.PIECE_BYTES, tcp.library
    sockets.PIECE_BYTES = piece_bytes
    if not compiled:
        tcp.library = lambda: None
    try:
        return every_operation(Group.of(connect(world)), dtype, numel)
    finally:
        sockets.PIECE_BYTES, tcp.library = before, kernels


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_equals_the_reference(size, dtype):
    """In rank order, bit by bit. Pieces of 64 bytes, so that a cut has several, the last one short."""
    for rank, got in enumerate(run_ranks(on_sockets, size, dtype, 101, 64, True)):
        assert differing(got, expected(rank, size, dtype, 101)) == []


@pytest.mark.parametrize("numel", [1, 2, 200_001])
def test_few_and_many_elements(numel):
    """Fewer elements than ranks leave some cuts empty; many do not fit into what the kernel buffers."""
    for rank, got in enumerate(run_ranks(on_sockets, 4, torch.float32, numel, 1 << 20, True)):
        assert differing(got, expected(rank, 4, torch.float32, numel)) == []


def _with_itself(world) -> list[float]:
    out = torch.zeros(3)
    connect(world).exchange(out, world.rank, torch.arange(3.0) + world.rank, world.rank)
    return out.tolist()


def test_a_rank_exchanges_with_itself():
    assert run_ranks(_with_itself, 2) == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]


@pytest.mark.parametrize("numel", [101, 200_001])
def test_without_a_compiler_it_is_the_same(numel):
    for rank, got in enumerate(run_ranks(on_sockets, 3, torch.float32, numel, 1 << 20, False)):
        assert differing(got, expected(rank, 3, torch.float32, numel)) == []


def to_many_at_once(world) -> bool:
    """With fewer links a call than there are other ranks."""
    before, tcp.AT_ONCE = tcp.AT_ONCE, 2
    try:
        mine, all_of_them = torch.full((50_000,), float(world.rank)), torch.empty(50_000 * world.size)
        connect(world).all_gather(all_of_them, mine)
    finally:
        tcp.AT_ONCE = before
    return all_of_them.view(world.size, -1).eq(torch.arange(world.size)[:, None]).all().item()


def test_more_ranks_than_links_of_a_call():
    assert run_ranks(to_many_at_once, 8) == [True] * 8


def two_ways(world) -> float:
    """A message on its way in another thread while collectives go on."""
    transport, other = connect(world), 1 - world.rank
    comes = torch.empty(3_000_000)
    thread = threading.Thread(target=transport.exchange, args=(comes, other, torch.full_like(comes, 7.0), other))
    thread.start()
    flat = torch.ones(1000)
    for _ in range(20):
        transport.all_reduce(flat, "avg")
    thread.join()
    return float(comes.sum()) + float(flat.sum())


def test_messages_do_not_disturb_collectives():
    assert run_ranks(two_ways, 2) == [21_000_000.0 + 1000.0] * 2


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

    def _swap(self, out, into) -> None:
        self.sent += sum(tensor.nbytes for tensor in out.values())
        super()._swap(out, into)


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
def test_collectives_send_the_bytes_of_the_formula(size):
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


@pytest.mark.alone
def test_a_late_rank_ends_in_an_error_after_the_timeout():
    with disposable_ranks(receive_from_the_silent, 2) as ranks:
        message, seconds = ranks[0].result()
    assert "rank 1 of the group for 1 s" in message and 0.9 < seconds < 5


def test_the_address_of_a_host_that_is_alone():
    """Of a store on the loopback network nothing is learned; what is taken instead must be one of this host's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for each in (dist.PrefixStore("a", dist.PrefixStore("b", store)), dist.HashStore()):
        address = tcp.address_towards(each)
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
            pass


def killed_in_the_middle(world, directory: str) -> str:
    transport = Sockets(dist.PrefixStore("killed", world.store), world.rank, world.size, True, timedelta(seconds=20))
    group = Group.of(transport)
    (Path(directory) / str(world.rank)).touch()
    flat = torch.ones(100_000)
    try:
        while True:
            group.all_reduce(flat, "avg")
    except LaunchError as error:
        return str(error)


@pytest.mark.alone
def test_a_killed_rank_ends_the_operation_of_all_others_at_once(tmp_path):
    with disposable_ranks(killed_in_the_middle, 4, str(tmp_path)) as ranks:
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.01)
        time.sleep(0.2)
        started = time.monotonic()
        os.kill(ranks[2].pid, signal.SIGKILL)
        messages = [rank.result() for rank in ranks if rank is not ranks[2]]
    assert time.monotonic() - started < 5
    assert any("rank 2 of the group has closed its connection" in message for message in messages)
    assert all("of the group has closed its connection" in message for message in messages)


def meet_a_stranger(world) -> float:
    """Rank 0 finds somebody at its door who does not know the secret before rank 1 comes."""
    store = dist.PrefixStore("stranger", world.store)
    if world.rank == 1:
        host, port = store.get("address/0").decode().split()
        with (
            socket.create_connection((host, int(port))) as stranger,
            socket.create_connection((host, int(port))) as mute,
        ):
            stranger.sendall(b"x" * 16 + bytes([0, 0, 0, 1, 0, 0, 0, 0]))
            mute.shutdown(socket.SHUT_WR)
            time.sleep(0.1)
    transport = Sockets(store, world.rank, world.size, True, timedelta(seconds=20))
    flat = torch.ones(10)
    transport.all_reduce(flat, "sum")
    return float(flat.sum())


def test_strangers_are_not_let_in():
    assert run_ranks(meet_a_stranger, 2) == [20.0] * 2


def meet_the_silent(world, speak: bool) -> float:
    """Rank 0 has six connections at its door that say nothing, or half a hello, and stay. Returns how long the ranks
    then took to meet."""
    store = dist.PrefixStore("silent strangers", world.store)
    strangers = []
    if world.rank == 1:
        host, port = store.get("address/0").decode().split()
        strangers = [socket.create_connection((host, int(port))) for _ in range(6)]
        for stranger in strangers if speak else []:
            stranger.sendall(b"GET / HTTP")
        time.sleep(0.2)
    started = time.monotonic()
    transport = Sockets(store, world.rank, world.size, True, timedelta(seconds=60))
    transport.barrier()
    seconds = time.monotonic() - started
    for stranger in strangers:
        stranger.close()
    return seconds


@pytest.mark.parametrize("speak", [False, True])
@pytest.mark.alone
def test_those_who_say_nothing_keep_nobody_waiting(speak):
    assert max(run_ranks(meet_the_silent, 2, speak)) < 3  # 30 if each were waited for


def come_too_late(world) -> str:
    if world.rank == 1:
        return ""
    try:
        Sockets(dist.PrefixStore("late", world.store), world.rank, world.size, True, timedelta(seconds=1))
    except LaunchError as error:
        return str(error)
    return "no error"


def call_where_nobody_is(world) -> str:
    store = dist.PrefixStore("nobody", world.store)
    if world.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        store.set("group", "00" * 16)
        store.set("address/0", f"127.0.0.1 {port}")
        return ""
    try:
        Sockets(store, world.rank, world.size, True, timedelta(seconds=5))
    except LaunchError as error:
        return str(error)
    return "no error"


def test_who_cannot_be_reached_is_named_with_the_address():
    said = run_ranks(call_where_nobody_is, 2)[1]
    assert "rank 1 of the group cannot reach rank 0 at 127.0.0.1, port" in said and "refused" in said


def test_who_does_not_connect_is_named():
    assert run_ranks(come_too_late, 2)[0] == "rank 1 did not connect within 1 s"


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

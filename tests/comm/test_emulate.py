"""Simulated ranks give the bits of real ones, end together, and throttled links take the time of their formula."""

from __future__ import annotations

import pytest
import torch

from shoal.comm import Group
from shoal.comm.emulate import Throttled, simulate
from shoal.comm.transport import sent_bytes
from shoal.errors import LaunchError, UserError
from tests.comm.operations import differing, every_operation, expected
from tests.pool import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operation_equals_the_reference_bit_by_bit(size, dtype):
    for rank, got in enumerate(simulate(size, every_operation, dtype, 7)):
        assert differing(got, expected(rank, size, dtype, 7)) == []


def on_a_real_rank(world, dtype: torch.dtype, numel: int) -> dict[str, torch.Tensor]:
    return every_operation(world.everyone, dtype, numel)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_ranks_of_one_host_give_the_same_bits(size, dtype):
    for simulated, real in zip(
        simulate(size, every_operation, dtype, 1001), run_ranks(on_a_real_rank, size, dtype, 1001), strict=True
    ):
        assert differing(simulated, real) == []


def one_fails(group: Group) -> str:
    if group.rank == 1:
        raise KeyError("lost")
    try:
        group.all_reduce(torch.ones(2))
    except LaunchError as error:
        messages[group.rank] = str(error)
        raise
    return "unreachable"


messages: dict[int, str] = {}


@pytest.mark.fast
def test_a_rank_that_raises_ends_the_others_and_its_error_is_raised():
    messages.clear()
    with pytest.raises(KeyError, match="lost"):
        simulate(3, one_fails)
    assert set(messages) == {0, 2}
    assert all("rank 1 has failed: KeyError: 'lost'" in message for message in messages.values())


def test_a_rank_that_returns_early_is_named():
    with pytest.raises(LaunchError, match="rank 1 has returned"):
        simulate(2, lambda group: group.rank == 1 or group.barrier())


def test_a_rank_that_is_late_is_named():
    def late(group: Group) -> None:
        if group.rank == 1:
            group.recv(torch.empty(1), 0)
        group.barrier()

    with pytest.raises(LaunchError, match=r"timed out after 0 s in '(recv|barrier)', waiting for ranks \[[01]\]"):
        simulate(2, late, timeout=0.2)


def test_ranks_in_different_operations_are_told():
    def mixed(group: Group) -> None:
        group.barrier() if group.rank else group.all_reduce(torch.ones(1))

    with pytest.raises(LaunchError, match="all ranks must call the same operations"):
        simulate(2, mixed)


def test_the_average_of_integers_is_refused():
    with pytest.raises(UserError, match="average of torch"):
        simulate(2, lambda group: group.all_reduce(torch.ones(1, dtype=torch.int64), "avg"))


def throttled(group: Group, numel: int) -> dict[str, float]:
    """Seconds slept in each operation, on 8 Mbit/s (a microsecond a byte) with 1 ms latency; rank 1 is three times
    slower."""
    slept: list[float] = []
    link = Throttled(group.transports["cpu"], 8e6, 1e-3, slow={1: 3.0}, sleep=slept.append)
    slow, seconds = Group.of(link), {}
    rank, size = group.rank, group.size
    mine, whole = torch.ones(numel), torch.ones(size * numel)
    calls = {
        "all_reduce": lambda: slow.all_reduce(whole),
        "reduce_scatter": lambda: slow.reduce_scatter(mine, whole),
        "all_gather": lambda: slow.all_gather(whole, mine),
        "all_to_all": lambda: slow.all_to_all(torch.empty_like(whole), whole),
        "broadcast": lambda: slow.broadcast(whole, 1),
        "scatter": lambda: slow.scatter(mine, whole if rank == 1 else None, 1),
        "gather": lambda: slow.gather(whole if rank == 1 else None, mine, 1),
        "exchange": lambda: slow.exchange(torch.empty_like(mine), (rank - 1) % size, mine, (rank + 1) % size),
        "barrier": slow.barrier,
    }
    for name, call in calls.items():
        slept.clear()
        call()
        seconds[name] = sum(slept)
    return seconds


@pytest.mark.fast
def test_a_throttled_link_takes_the_time_of_its_formula():
    """1,000 floats a cut, 3 ranks: a cut is 4 ms; an all-reduce sends 2 x 2 cuts in 4 messages: 20 ms."""
    first, slow, last = simulate(3, throttled, 1000)
    assert first == pytest.approx(
        {
            "all_reduce": 0.020,
            "reduce_scatter": 0.010,
            "all_gather": 0.010,
            "all_to_all": 0.009,
            "broadcast": 0.001,
            "scatter": 0.001,
            "gather": 0.005,
            "exchange": 0.005,
            "barrier": 0.001,
        }
    )
    assert last == first
    assert slow == pytest.approx(
        {
            **{name: 3 * seconds for name, seconds in first.items()},
            "broadcast": 3 * (0.001 + 1e-6 * sent_bytes("broadcast", 12_000, 3, 1, 1)),
            "scatter": 3 * 0.009,
            "gather": 3 * 0.009,
        }
    )


def through_a_throttle(group: Group) -> dict[str, torch.Tensor]:
    return every_operation(Group.of(Throttled(group.transports["cpu"], 1e12)), torch.float32, 5)


def test_a_throttle_changes_no_bit():
    for rank, got in enumerate(simulate(3, through_a_throttle)):
        assert differing(got, expected(rank, 3, torch.float32, 5)) == []

"""All-reduce in shared memory: the same bits on every rank as a sum in rank order, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch

from shoal.comm import shm
from shoal.errors import LaunchError
from tests.pool import disposable_ranks, run_ranks

SIZES = [1, 2, 3, 7, 1000, shm.SLOT_BYTES // 4 - 1, shm.SLOT_BYTES // 4, shm.SLOT_BYTES // 4 + 1, 3 * shm.SLOT_BYTES // 4 + 5]


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank * 1000 + numel)
    return (
        torch.randint(-9, 10, (numel,), generator=draw).to(dtype)
        if not dtype.is_floating_point
        else torch.randn(numel, generator=draw).to(dtype)
    )


def reduce_all(world, dtype: torch.dtype, op: str) -> list[bool]:
    group = world.everyone
    assert group._shared is not None
    combine = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}[op]
    right = []
    for numel in SIZES:
        expected = values(0, numel, dtype)
        for rank in range(1, world.size):
            expected = combine(expected, values(rank, numel, dtype))
        right.append(torch.equal(group.all_reduce(values(world.rank, numel, dtype).clone(), op), expected))
    return right


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.float32, "sum"), (torch.bfloat16, "sum"), (torch.float64, "max"), (torch.int64, "min"), (torch.int32, "product")],
)
def test_every_rank_gets_the_sum_in_rank_order_bit_by_bit(size, dtype, op):
    for result in run_ranks(reduce_all, size, dtype, op):
        assert result == [True] * len(SIZES)


def mapped(world) -> tuple[list[str], bool]:
    group = world.everyone
    group.barrier()
    return [name.name for name in Path("/dev/shm").glob("shoal-*")], "shoal-" in Path("/proc/self/maps").read_text()


@pytest.mark.fast
def test_the_segment_has_no_name_once_all_have_it():
    for files, has_it in run_ranks(mapped, 2):
        assert files == [] and has_it


def too_little(world) -> tuple[float, bool, list[str]]:
    shm._PAGE = 1 << 60  # no machine has that much shared memory
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group = world.everyone
            return group.all_reduce(torch.ones(3)).sum().item(), group._shared is None, [str(w.message) for w in caught]
    finally:
        shm._PAGE = 4096


@pytest.mark.fast
def test_too_little_shared_memory_is_said_once_and_sockets_are_used():
    results = run_ranks(too_little, 2)
    assert [result[:2] for result in results] == [(6.0, True)] * 2
    (message,), silence = results[0][2], results[1][2]
    assert "shared memory cannot be used" in message and "MiB needed" in message and silence == []


def one_cannot_map(world) -> bool:
    if world.rank == 1:
        shm._map = lambda path: (_ for _ in ()).throw(OSError("not here"))
    group = world.everyone
    return group._shared is None and group.all_reduce(torch.ones(2)).sum().item() == 4


def test_if_one_rank_cannot_all_do_without():
    with disposable_ranks(one_cannot_map, 2) as ranks:
        assert [rank.result() for rank in ranks] == [True, True]


def reduce_until_a_rank_is_gone(world) -> tuple[str, float]:
    group = world.everyone
    started = time.monotonic()
    try:
        while True:
            started = time.monotonic()
            group.all_reduce(torch.ones(1000), purpose="gradients 0")
            time.sleep(0.01)
    except LaunchError as error:
        return str(error), time.monotonic() - started


def test_a_killed_rank_is_noticed_at_once():
    with disposable_ranks(reduce_until_a_rank_is_gone, 3) as ranks:
        time.sleep(1.5)
        os.kill(ranks[1].pid, signal.SIGKILL)
        message, seconds = ranks[0].result()
    assert "all_reduce (gradients 0), failed" in message and "not there: rank 1" in message
    assert "has ended" in message and seconds < 10

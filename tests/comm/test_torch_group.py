"""A Group over torch's process groups: the operations that algorithms use, on each backend that the CPU has."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm import Ledger, World
from shoal.comm.torch_group import open_group
from tests.comm.operations import every_operation, expected
from tests.pool import run_ranks

ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}


def on_process_group(world: World, backend: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    store = dist.PrefixStore("torch_group", world.store)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=30))
    try:
        return every_operation(open_group(dist.group.WORLD, "test", range(world.size), Ledger()), dtype, 101)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8], ids=str)
def test_every_operation_equals_the_reference(backend, dtype):
    for rank, got in enumerate(run_ranks(on_process_group, 3, backend, dtype)):
        want = expected(rank, 3, dtype, 101)
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=ROUNDING.get(dtype, 0), atol=ROUNDING.get(dtype, 0))


def some_of_them(world: World) -> tuple[list[int], float, float]:
    """Ranks 1 and 3 sum among themselves; 0 and 2 are not asked. Rank 0 alone makes a group of one."""
    store = dist.PrefixStore("some", world.store)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=30))
    try:
        ledger = Ledger()
        places = [1, 3] if world.rank in (1, 3) else [world.rank]
        group = open_group(dist.group.WORLD, "some", places, ledger)
        return group.ranks, float(group.all_reduce(torch.tensor(float(world.rank + 1)))), ledger.total("some").wire
    finally:
        dist.destroy_process_group()


def test_a_group_of_some_ranks():
    results = run_ranks(some_of_them, 4)
    assert [ranks for ranks, _, _ in results] == [[0], [1, 3], [2], [1, 3]]
    assert [total for _, total, _ in results] == [1, 6, 3, 6]
    assert [wire for _, _, wire in results] == [0, 4, 0, 4]

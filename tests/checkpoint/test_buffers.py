"""Persistent buffers of a pipeline's stages: saved by the stage that has them, read under any other plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.models import regression
from tests.pool import run_ranks


class Block(nn.Module):
    """Has statistics, a scale that nothing but a checkpoint tells, and a table that is not saved."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("table", torch.full((6,), float(number)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.inner(x)) * self.scale + self.table)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(number) for number in range(4)), nn.Linear(6, 2)
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.offset


def rows() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(4)
    return [{"inputs": torch.randn(6, generator=draw), "targets": torch.randn(2, generator=draw)} for _ in range(16)]


def make(world: Any, plan: dict[str, Any]) -> Engine:
    torch.set_num_threads(1)
    return Engine(
        Net, regression, partial(torch.optim.SGD, lr=0.05), Plan(**plan), global_batch=8, microbatch=4,
        precision="fp64", world=world,
    )  # fmt: skip


def buffers(running: Engine) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in running.module.named_buffers()}


def saved(world: Any, plan: dict[str, Any], directory: str) -> tuple[dict[str, Tensor], float]:
    running = make(world, plan)
    for name, each in running.module.named_buffers():
        if name.endswith(("scale", "offset")):
            each.add_(sum(map(ord, name)) % 7 / 10)
    for batch in running.batches(rows(), steps=3):
        running.step(batch)
    running.save(directory)
    found = buffers(running), running.evaluate(rows()).loss
    running.close()
    return found


def loaded(world: Any, plan: dict[str, Any], directory: str) -> tuple[dict[str, Tensor], float]:
    running = make(world, plan)
    running.load(directory)
    found = buffers(running), running.evaluate(rows()).loss
    running.close()
    return found


PLANS: list[dict[str, Any]] = [
    {"pp": 2},
    {"pp": 4},
    {"dp": 2},
    {"dp": 2, "pp": 2},
    {"pp": 2, "schedule": "interleaved"},
    {},
]


@pytest.mark.parametrize(("first", "then"), [(0, 5), (0, 1), (0, 2), (1, 0), (2, 0), (3, 4), (4, 3), (5, 3)])
def test_buffers_of_stages_are_read_under_another_plan(first: int, then: int, tmp_path: Path) -> None:
    """Each rank has those of the model's that it has at all, as the stages had them that ran them."""
    sizes = [plan.get("dp", 1) * plan.get("pp", 1) for plan in PLANS]
    before = run_ranks(saved, sizes[first], PLANS[first], str(tmp_path))
    by_owner: dict[str, list[Tensor]] = {}
    for theirs, _ in before:
        for name, value in theirs.items():
            by_owner.setdefault(name, []).append(value)
    assert len(by_owner) == 4 * 5 + 1
    for theirs, loss in run_ranks(loaded, sizes[then], PLANS[then], str(tmp_path)):
        assert loss == pytest.approx(before[0][1], rel=1e-9)
        for name, value in theirs.items():
            assert any(torch.equal(value, each) for each in by_owner[name]), name

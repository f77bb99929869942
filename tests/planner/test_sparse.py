"""Embeddings whose gradients come by rows."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import shoal
from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world
from shoal.models import regression
from tests.exchange import teacher

WIDTH = 24
SGD = partial(torch.optim.SGD, lr=0.05)


class ByRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.outward = nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table((x.abs() * 20).long().clamp(max=49)).mean(1)
        for block in self.blocks:
            h = h + block(h).tanh()
        return self.outward(h)


def ask(world, pins) -> Plan:
    torch.set_num_threads(1)
    given = (ByRows, regression, SGD, teacher.data()[0])
    return shoal.auto_plan(*given, global_batch=16, microbatch=4, pins=pins, world=world)[0]


def train(world, plan: Plan) -> list[float]:
    torch.set_num_threads(1)
    running = Engine(ByRows, regression, SGD, plan, global_batch=16, microbatch=4, world=world)
    try:
        return [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
    finally:
        running.close()


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_model_with_them_is_planned_for(axis):
    """A dry run asked its gradient, which has no storage of its own, for one; only the engine took it."""
    plan = simulate_world(2, ask, {axis: 2})[0]
    assert getattr(plan, axis) == 2
    (one,) = simulate_world(1, train, Plan())
    for losses in simulate_world(2, train, plan):
        assert losses == pytest.approx(one, rel=1e-5)

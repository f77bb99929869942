"""Recomputed blocks that are cut: a Sequential of single layers, of which stages have a part each. Losses and
running statistics are those of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world

D = 8


def layers() -> list[nn.Module]:
    return [nn.BatchNorm1d(D), nn.Linear(D, D), nn.Dropout(0.2), nn.Tanh()]


class Grouped(nn.Module):
    """Its parts are norms and linear layers, between a first and a last one; recompute takes groups of two of each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(D, D), nn.Linear(D, 3)
        self.groups = nn.Sequential(*(nn.Sequential(*layers(), *layers()) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.groups(self.stem(x)))


def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["x"]).square().sum(), batch["x"].numel()


ROWS = [{"x": torch.randn(D, generator=torch.Generator().manual_seed(row))} for row in range(8)]
SGD = partial(torch.optim.SGD, lr=0.1)


def trained(world: Any, plan: dict[str, Any]) -> list[float]:
    engine = Engine(Grouped, squares, SGD, Plan(**plan), world=world, precision="fp64", global_batch=4, microbatch=2)
    try:
        losses = [engine.step(batch).loss for batch in engine.batches(ROWS, steps=3)]
        return [*losses, engine.evaluate(ROWS).loss]  # evaluated with the running statistics
    finally:
        engine.close()


@pytest.mark.parametrize(
    "plan",
    [
        {"stages": [5, 5], "recompute": "full"},  # at the border of two groups
        {"stages": [4, 6], "recompute": "full"},  # in the middle of one
        {"stages": [3, 7], "recompute": "selective"},
        {"stages": [8, 2], "recompute": {"name": "blocks", "full": "0"}, "schedule": "zb1p"},
        {"stages": [3, 7], "recompute": "full", "dp": 2, "zero": 3},
        {"stages": [2, 3, 3, 2], "recompute": "full", "schedule": {"name": "interleaved", "chunks": 2}},
    ],
    ids=str,
)
def test_a_group_of_layers_of_several_stages_is_computed_again_as_it_was(plan):
    whole = simulate_world(1, trained, {})[0]
    for found in simulate_world(Plan(pp=2, **plan).size, trained, {"pp": 2, **plan}):
        assert found == pytest.approx(whole, rel=1e-12)

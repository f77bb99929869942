"""Models with parameters of no elements, as MobileBERT has where its sizes are equal, cut as their graph says."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world

D = 8


class Wider(nn.Module):
    """Its layer is made wider by none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.more = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.Linear(D, 0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.down(F.gelu(self.up(x))), self.more(x)], -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wider() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(batch["x"]).square().sum(), batch["x"].numel()


ROWS = [{"x": torch.randn(D, generator=torch.Generator().manual_seed(row))} for row in range(4)]


def trained(world: Any) -> tuple[list[float], int]:
    engine = Engine(Model, squares, partial(torch.optim.SGD, lr=0.1), Plan(tp=world.size), world=world, global_batch=4)
    try:
        losses = [engine.step(batch).loss for batch in engine.batches(ROWS, steps=2)]
        return losses, sum(each.numel() for each in engine.module.parameters())
    finally:
        engine.close()


def test_a_layer_of_no_features_does_not_keep_others_whole():
    whole, size = simulate_world(1, trained)[0]
    for losses, part in simulate_world(2, trained):
        assert losses == pytest.approx(whole, rel=1e-5) and part < 0.6 * size

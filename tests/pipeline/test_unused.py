"""Values of other stages that a part finds elsewhere than among its arguments, and those that nobody needs at first."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world
from shoal.errors import TrainingError
from shoal.module.stand_in import StandIn
from tests.pipeline.running import losses_of

WIDTH = 8
STAGES = {"pp": 3, "stages": [["first"], ["second"], ["third"]]}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.beside: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x + sum(self.beside))


class Three(nn.Module):
    """`skips`: the first layer's result is also added to the third one's input, by way of an attribute."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.first, self.second, self.third, self.skips = Layer(), Layer(), Layer(), skips

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.third.beside = [x] if self.skips else []
        return self.third(self.second(x))


def squares(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    return F.mse_loss(model(mb["x"]), mb["y"], reduction="sum"), torch.tensor(mb["x"].numel())


def rows() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{name: torch.randn(WIDTH, generator=draw) for name in "xy"} for _ in range(16)]


def losses(world: Any, plan: dict[str, Any]) -> list[float]:
    return losses_of(world, partial(Three, True), squares, rows(), plan, 8)


def changing(world: Any) -> None:
    """The path to the third layer is there from the second step on."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = Engine(partial(Three, False), squares, sgd, Plan(**STAGES), global_batch=8, microbatch=4, world=world)
    batches = engine.batches(rows(), steps=2)
    try:
        engine.step(next(batches))
        engine.module.skips = True
        engine.step(next(batches))
    finally:
        engine.close()


def test_a_tensor_that_the_forward_puts_on_a_part_of_another_stage_travels() -> None:
    (alone,) = simulate_world(1, losses, {})
    for found in simulate_world(3, losses, STAGES):
        assert found == pytest.approx(alone, rel=1e-5)


def test_what_is_set_on_a_stand_in_is_set_on_its_part() -> None:
    part: Any = nn.Sequential(nn.Linear(2, 2))
    stand_in: Any = StandIn(part, part)
    stand_in.note = 3
    stand_in.eval()
    assert part.note == stand_in.note == 3 and not part[0].training and not stand_in.training


def test_a_value_that_is_used_only_later_gives_no_wrong_loss() -> None:
    with pytest.raises(TrainingError, match="the loss is nan"):
        simulate_world(3, changing)

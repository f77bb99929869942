"""Models with images of `transformers`, which check by values that a row has as many places as there are features, and
distributions, which check what they are made of: the planner, which has no values, leaves that out; forwards do not."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils.import_utils import torch_compilable_check

from shoal import Engine, Plan, auto_plan
from shoal.comm.simulation import simulate_world
from shoal.module.value_checks import values_unchecked
from shoal.planner.cluster import Cluster, Device, Host, Link

D, IMAGE, SWITCH = 16, 0, "TRANSFORMERS_DISABLE_TORCH_CHECK"
HERE = Cluster(
    "here",
    (Host(Device("cores", {"fp32": 1e11}, 2**33, 1e10, on_host=True), 2, Link(1e-5, 2e9), 2**33, 5e9),),
    Link(1e-4, 1e9),
    0.3,
)  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Sees(nn.Module):
    """Puts an image's features where the tokens say so, as Llava and its kin do."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block() for _ in range(2))
        self.tokens, self.out = nn.Embedding(7, D), nn.Linear(D, 7)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        for block in self.tower:
            image = block(image)
        x, places = self.tokens(ids), ids == IMAGE
        number = places.sum()
        torch_compilable_check(number * D == image.numel(), f"features do not match, tokens: {number}")
        x = x.masked_scatter(places.unsqueeze(-1), image.to(x.dtype))
        for block in self.layers:
            x = block(x)
        return self.out(x)


class Codes(nn.Module):
    """Makes a distribution between its blocks, and gives one, as an autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> torch.distributions.Normal:
        for block in self.blocks:
            code = torch.distributions.Normal(block(image), torch.ones_like(image))
            image = code.mean + code.log_prob(image)
        return torch.distributions.Normal(image, 1.0)


def likelihood(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    found = -model(batch["ids"], batch["image"]).log_prob(batch["image"]).sum()
    return found, batch["ids"].numel()


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    logits = model(batch["ids"], batch["image"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["ids"].flatten(), reduction="sum"), batch[
        "ids"
    ].numel()


def rows(images: int = 2) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 7, (5,), generator=draw) for _ in range(8)]
    return [
        {"ids": torch.cat([torch.full((images,), IMAGE), each]), "image": torch.randn(2, D, generator=draw)}
        for each in ids
    ]


SGD = partial(torch.optim.SGD, lr=0.1)


def trained(world: Any, pins: dict[str, Any] | None, model: Any = Sees, loss: Any = loss) -> list[float]:
    plan = Plan()
    if pins is not None:
        plan, _ = auto_plan(
            model, loss, SGD, rows()[0], global_batch=4, microbatch=2, pins=pins, cluster=HERE, world=world
        )  # fmt: skip
        assert all(getattr(plan, axis) == degree for axis, degree in pins.items())
    engine = Engine(model, loss, SGD, plan, world=world, global_batch=4, microbatch=2)
    try:
        return [engine.step(batch).loss for batch in engine.batches(rows(), steps=3)]
    finally:
        engine.close()


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_a_model_that_checks_values_is_planned_and_trains_alike(axis):
    whole = simulate_world(1, trained, None)[0]
    for each in simulate_world(2, trained, {axis: 2}):
        assert each == pytest.approx(whole, rel=1e-5)
    assert SWITCH not in os.environ


def test_a_model_with_distributions_is_planned_and_trains_alike_in_stages():
    before = torch.distributions.Distribution._validate_args  # torch.compile leaves them out for good
    whole = simulate_world(1, trained, None, Codes, likelihood)[0]
    for each in simulate_world(2, trained, {"pp": 2}, Codes, likelihood):
        assert each == pytest.approx(whole, rel=1e-5)
    assert torch.distributions.Distribution._validate_args is before


def test_a_forward_makes_its_checks():
    engine = Engine(Sees, loss, SGD, Plan(), global_batch=4)
    with pytest.raises(ValueError, match="features do not match, tokens: 12"):
        engine.step(next(iter(engine.batches(rows(3), steps=1))))
    engine.close()


def test_what_was_set_is_set_again(monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    with values_unchecked(), values_unchecked():
        assert os.environ[SWITCH] == "1"
    assert os.environ[SWITCH] == "0"

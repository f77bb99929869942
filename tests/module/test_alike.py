"""Ranks whose constructors drew each for itself train one model."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from shoal.comm.simulation import simulate_world
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import regression
from shoal.plan import Plan
from tests.pool import run_ranks

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        unseeded = np.random.default_rng()
        self.register_buffer("features", torch.from_numpy(unseeded.normal(size=4).astype("float32")))
        self.shift = nn.Parameter(torch.tensor(unseeded.normal(size=4), dtype=torch.float32))
        self.scale = torch.tensor(unseeded.normal(size=4), dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) * self.features + self.shift * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def kept(world, ready: bool, axis: str) -> dict[str, list[float]]:
    if ready:
        torch.manual_seed(world.rank)
    plan = Plan(**{axis: world.size})
    rules = {"blocks.0": "column", "blocks.1": "row"} if axis == "tp" else None
    model = Features() if ready else Features
    engine = Engine(model, regression, ADAMW, plan, global_batch=2, tensor_rules=rules, world=world)
    found = {"features": engine.module.features, "shift": engine.module.shift, "scale": engine.module.scale}
    values = {name: tensor.tolist() for name, tensor in found.items()}
    engine.close()
    return values


@pytest.mark.parametrize(("ready", "axis"), [(False, "dp"), (True, "tp"), (True, "dp")])
def test_ranks_that_draw_for_themselves_have_the_first_ones_values(ready, axis):
    one, other = run_ranks(kept, 2, ready, axis)
    assert one == other


def refusal(world) -> str:
    width = 3 + world.rank
    with pytest.raises(UserError) as error:
        Engine(lambda: nn.Linear(width, 2), regression, ADAMW, global_batch=2, world=world)
    return str(error.value)


def test_ranks_with_other_parameters_are_refused_on_all_of_them():
    one, other = run_ranks(refusal, 2)
    assert one == other and "models of other parameters" in one


TRIED: list[torch.Tensor] = []


class Tries(nn.Linear):
    """Tries something once in a process, as a library may that peft asks for the weights of its adapters."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        if not TRIED:
            TRIED.append(torch.from_numpy(np.ones(3)) + 1.0)


def built_again(world) -> list[float]:
    TRIED[:] = [torch.ones(1)] if world.rank == 0 else []  # rank 0 has built one before: the planner does
    engine = Engine(Tries, regression, ADAMW, global_batch=2, world=world)
    values = engine.module.weight.flatten().tolist()
    assert engine.build_note == "recorded"
    engine.close()
    return values


def test_what_only_one_rank_tries_does_not_make_its_model_another():
    one, other = run_ranks(built_again, 2)
    assert one == other


def drawn(world, built: list[str]) -> list[float]:
    engine = Engine(partial(nn.Linear, 64, 64), regression, ADAMW, global_batch=2, world=world)
    built.append(engine.build_note)
    values = engine.module.weight.flatten()[:3].tolist()
    engine.close()
    return values


def test_ranks_that_are_threads_do_not_seed_each_other():
    notes: list[str] = []
    found = [each for _ in range(8) for each in simulate_world(3, partial(drawn, built=notes))]
    assert found == [found[0]] * 24 and set(notes) == {"recorded"}

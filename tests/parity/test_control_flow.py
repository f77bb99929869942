"""Models whose path depends on their data, by torch.cond: under every plan what one process does."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.models import regression
from tests.parity.cases import EVEN, vectors
from tests.parity.covering import thinned
from tests.pool import apart, run_ranks

RULES = {"layers.*.wide": "column", "layers.*.narrow": "row"}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "zero3-hosts": {"dp": 2, "zero": 3},
    "offload": {"dp": 2, "memory": {}},
    "tp2": {"tp": 2},
    "recompute": {"dp": 2, "recompute": "full"},
    "compiled": {"dp": 2, "compile": "aot_eager"},
    "compiled-tp2-zero1": {"dp": 2, "tp": 2, "zero": 1, "compile": "aot_eager"},
}


class Layer(nn.Module):
    """A wide layer and a narrow one; then a deep path or a short one, as the microbatch is."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.deep, self.short = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.narrow(self.wide(x).tanh())
        weights = self.deep.weight, self.deep.bias, self.short.weight, self.short.bias
        return x + torch.cond(h[:, 0].mean() > h[:, 1].mean(), _deep, _short, (h, *weights))


def _deep(h: Tensor, deep: Tensor, bias: Tensor, short: Tensor, shift: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.linear(h, deep, bias).tanh(), deep, bias) + 0 * (
        short.sum() + shift.sum()
    )


def _short(h: Tensor, deep: Tensor, bias: Tensor, short: Tensor, shift: Tensor) -> Tensor:
    return nn.functional.linear(h, short, shift) + 0 * (deep.sum() + bias.sum())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = (
            nn.Linear(10, 16),
            nn.ModuleList(Layer() for _ in range(3)),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def losses(world, plan: str) -> list[float]:
    options = {
        "global_batch": 12,
        "microbatch": 3,
        "precision": "fp64",
        "world": apart(world) if "hosts" in plan else world,
    }
    rules = RULES if "tp" in plan else None
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    running = Engine(Model, regression, optimizer, Plan(**PLANS.get(plan, {})), tensor_rules=rules, **options)
    rows = vectors()[:EVEN] if "compiled" in plan else vectors()  # compiled for each shape of a batch
    found = [running.step(batch).loss for batch in running.batches(rows, steps=6)]
    found.append(running.evaluate(rows).loss)
    running.close()
    return found


def paths(world) -> set[bool]:
    """Which way a layer goes on the microbatches of the first steps."""
    running = Engine(
        Model, regression, partial(torch.optim.AdamW, lr=3e-3), Plan(), global_batch=12, microbatch=3, world=world
    )
    seen: set[bool] = set()
    running.module.layers[1].narrow.register_forward_hook(
        lambda module, _, out: seen.add(bool(out[:, 0].mean() > out[:, 1].mean()))
    )
    for batch in running.batches(vectors(), steps=6):
        running.step(batch)
    return seen


@cache
def one_process(even: bool) -> list[float]:
    return run_ranks(losses, 1, "compiled-by-none" if even else "one")[0]


def test_microbatches_go_both_ways():
    assert run_ranks(paths, 1)[0] == {True, False}


SOME = [(plan,) for plan in PLANS if plan != "compiled"]  # the other compiled one has all that it has


@pytest.mark.parametrize("plan", thinned([(plan,) for plan in PLANS], SOME))
def test_a_path_that_depends_on_the_data_is_that_of_one_process(plan):
    for found in run_ranks(losses, Plan(**{**PLANS[plan], "memory": None}).size, plan):
        assert found == pytest.approx(one_process("compiled" in plan), rel=1e-9)

"""Modules of torch.jit inside a model, and layers without a shape."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import shoal
from shoal import Engine, Plan, UserError
from shoal.comm.simulation import simulate_world
from shoal.models import regression
from tests.exchange import teacher

WIDTH = 24
SGD = partial(torch.optim.SGD, lr=0.05)


class Adds(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.inner(x)).tanh()


class Model(nn.Module):
    """Blocks of torch.jit between two layers."""

    def __init__(self, make=torch.jit.script, norm: bool = False) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)
        self.blocks = nn.ModuleList(make(Adds(norm)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inward(x)
        for block in self.blocks:
            h = block(h)
        return self.outward(h)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.LazyLinear(WIDTH), nn.LazyLinear(teacher.OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(self.inward(x).tanh())


def run_once() -> nn.Module:
    model = Lazy()
    model(torch.zeros(1, teacher.INPUTS))
    return model


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def train(world, model, plan=None, **how) -> list[float]:
    torch.set_num_threads(1)
    running = Engine(
        model, regression, SGD, Plan(**(plan or {})), global_batch=16, microbatch=4, world=world, **how
    )  # fmt: skip
    try:
        losses = [running.step(batch).loss for batch in running.batches(teacher.data(), steps=3)]
        return [*losses, running.evaluate(teacher.data()).loss]
    finally:
        running.close()


def traced(module: nn.Module) -> nn.Module:
    return torch.jit.trace(module, torch.zeros(2, WIDTH))


PLANS = {
    "dp": (2, {"dp": 2}),
    "zero1": (2, {"dp": 2, "zero": 1}),
    "gathered": (2, {"dp": 2, "zero": 3}),
    "memory": (1, {"memory": {"device": "1GB"}}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2}),
    "compile": (1, {"compile": "aot_eager"}),
    "recompute": (1, {"recompute": "full"}),
    "selective": (1, {"recompute": "selective"}),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", [torch.jit.script, traced])
def test_scripted_blocks_train_as_in_one_process(make, plan):
    size, values = PLANS[plan]
    (one,) = simulate_world(1, train, partial(Model, make))
    for losses in simulate_world(size, train, partial(Model, make), values):
        assert losses == pytest.approx(one, rel=1e-5)


def test_their_running_statistics_are_not_merged():
    """They were those of the first replica, and nothing was said."""
    with pytest.raises(UserError, match=r"blocks.0 is a module of torch.jit with BatchNorm.*plan.dp = 1"):
        simulate_world(2, train, partial(Model, norm=True), {"dp": 2})
    (one,), two = simulate_world(1, train, partial(Model, norm=True)), simulate_world(
        2, train, partial(Model, norm=True), {"pp": 2}
    )  # fmt: skip
    assert two[0] == pytest.approx(one, rel=1e-5)


def test_their_draws_are_not_keyed():
    def model() -> nn.Module:
        part = nn.Sequential(nn.Linear(teacher.INPUTS, WIDTH), nn.Dropout(0.3))
        return nn.Sequential(torch.jit.script(part), nn.Linear(WIDTH, teacher.OUTPUTS))

    with pytest.raises(UserError, match=r'0 is a module of torch.jit and draws \(dropout\).*dropout = "fused"'):
        simulate_world(1, train, model)
    assert len(simulate_world(1, partial(train, dropout="fused"), model)[0]) == 4


def test_a_model_that_is_scripted_as_a_whole_says_what_to_do():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(teacher.INPUTS, WIDTH), nn.Linear(WIDTH, teacher.OUTPUTS)))
    with pytest.raises(UserError, match=r"of torch.jit as a whole.*self.inner = scripted"):
        simulate_world(1, train, lambda: scripted)
    assert all(loss < 10 for loss in simulate_world(1, train, Around(scripted))[0])


def ask(world, model) -> tuple[Plan, int]:
    sample = teacher.data()[0]
    return shoal.auto_plan(model, regression, SGD, sample, global_batch=16, microbatch=4, world=world)


@pytest.mark.parametrize("door", ["factory", "module", "auto_plan"])
def test_a_lazy_layer_says_what_to_do(door):
    with pytest.raises(UserError, match=r"inward.weight has no shape yet.*run the model once"):
        if door == "auto_plan":
            simulate_world(1, ask, Lazy)
        else:
            simulate_world(1, train, Lazy if door == "factory" else Lazy())
    losses = [simulate_world(size, train, run_once, {"dp": size})[0] for size in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)

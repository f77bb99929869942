"""Numbers that each forward changes are said, as replicas would have other ones than one process."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world
from shoal.models import regression
from tests.exchange import teacher


class Counts(nn.Module):
    """Computes with a count of its forwards, which it keeps itself, or its class does, or the caller sets."""

    of_all = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(teacher.INPUTS, teacher.OUTPUTS), where
        self.own, self.is_begun = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.is_begun = True
        if self.where == "class":
            type(self).of_all += 1
        self.own += self.where == "own"
        return self.layer(x) * (1 + 0.1 * (self.own + type(self).of_all))


class Drops(Counts):
    """Has a layer that Shoal stands in for, which counts its calls."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.dropout(x))


def losses(world, where: str, model: type[Counts] = Counts) -> list[float]:
    torch.set_num_threads(1)
    sgd = partial(torch.optim.SGD, lr=0.05)
    how = {"plan": Plan(dp=world.size), "global_batch": 16, "microbatch": 4, "world": world}
    engine = Engine(partial(model, where), regression, sgd, **how)
    try:
        found = []
        for step, batch in enumerate(engine.batches(teacher.data(), steps=3)):
            if where == "caller":
                engine.module.own = step
            found.append(engine.step(batch).loss)
        return found
    finally:
        engine.close()


@pytest.mark.parametrize(("where", "name"), [("own", "own"), ("class", "Counts.of_all")])
def test_a_number_that_forwards_change_is_said_on_several_replicas(where, name, monkeypatch):
    monkeypatch.setattr(Counts, "of_all", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate_world(1, losses, where)
    with pytest.warns(UserWarning, match=f"forwards change {name}, a number.*each of 2 replicas.*between steps"):
        simulate_world(2, losses, where)


@pytest.mark.parametrize("model", [Counts, Drops])
def test_what_the_caller_sets_between_steps_is_that_of_one_process(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (one,), two = simulate_world(1, losses, "caller", model), simulate_world(2, losses, "caller", model)
    assert two[0] == pytest.approx(one, rel=1e-5)

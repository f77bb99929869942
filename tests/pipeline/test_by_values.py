"""Stages of models whose shapes, between their parts, depend on values: experts that a loop gives their tokens."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from tests.pipeline.running import losses_of


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return x + out


class SomeExperts(Experts):
    """Leaves out experts that have no tokens."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel():
                x = x.index_add(0, rows, expert(x[rows]))
        return x


class Model(nn.Module):
    def __init__(self, mixture: type[nn.Module] = Experts) -> None:
        super().__init__()
        self.up, self.mixture, self.head = nn.Linear(8, 8), mixture(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixture(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(8), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(self.norm(x))


class InBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class OneHot(nn.Module):
    """Looks up a row by the largest of what a part of the first stage gives."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.rows, self.head = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.gate(x).argmax(-1), num_classes=4)
        return self.head(x + self.rows(chosen.to(x.dtype)))


class Counts(nn.Module):
    """Weighs its result by a number of the first part, which it takes out of the tensor by no operation."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.gate, self.head, self.read = nn.Linear(8, 8), nn.Linear(8, 8), read

    def forward(self, x: Tensor) -> Tensor:
        h = self.gate(x)
        return self.head(h) * (1 + float(self.read(h.argmax(-1).sum())))


def squares(model: nn.Module, mb: Any) -> tuple[Tensor, Tensor]:
    return F.mse_loss(model(mb["x"]), mb["y"], reduction="sum"), torch.tensor(mb["x"].numel())


def losses(world: Any, model: Any, plan: dict[str, Any]) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(8, generator=draw), "y": torch.randn(8, generator=draw)} for _ in range(16)]
    return losses_of(world, model, squares, rows, plan, 8)


@pytest.mark.parametrize("mixture", [Experts, SomeExperts])
@pytest.mark.parametrize("stages", [None, [["up", "mixture"], ["head"]]])
def test_experts_that_are_cut_from_what_follows_are_refused_in_words(stages: Any, mixture: type[nn.Module]) -> None:
    with pytest.raises(UserError, match="what depends on values has to lie in the last stage"):
        simulate_world(2, losses, partial(Model, mixture), {"pp": 2, "stages": stages})


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (Model, {"stages": [["up"], ["mixture", "head"]]}),
        (partial(Model, SomeExperts), {"stages": [["up"], ["mixture", "head"]]}),
        (InBlocks, {}),
        (InBlocks, {"compile": "aot_eager"}),  # dynamo, under who looks, gives what a line before gave
        (OneHot, {"stages": [["gate"], ["rows", "head"]]}),
    ],
)
def test_what_depends_on_values_may_lie_in_the_last_stage_or_in_a_block(model: Any, plan: dict[str, Any]) -> None:
    (alone,) = simulate_world(1, losses, model, {})
    for found in simulate_world(2, losses, model, {"pp": 2, **plan}):
        assert found == pytest.approx(alone, rel=1e-5)


class Dropped(nn.Module):
    """Leaves out layers by chance, as LayerDrop does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for layer in self.layers:
            x = x if random.random() < 0.5 else layer(x)
        return self.head(x)


def told(world: Any, stages: Any) -> Any:
    try:
        return losses(world, Dropped, {"pp": 2, "stages": stages})
    except UserError as error:
        return str(error)


def test_layers_that_are_dropped_by_chance_lie_in_the_last_stage_or_all_ranks_say_why_not() -> None:
    """One rank said that nothing may depend on data, the other one that a group was closed."""
    layers = [f"layers.{number}" for number in range(3)]
    first, second = simulate_world(2, told, [["up", *layers[:2]], [layers[2], "head"]])
    assert first == second
    assert re.search(
        r"this microbatch .* the first one .*LayerDrop.* in the last stage.*plan.pp = 1.* layerdrop = 0", first
    )
    (alone,) = simulate_world(1, losses, Dropped, {})
    for found in simulate_world(2, told, [["up"], [*layers, "head"]]):
        assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy, np.asarray])
def test_a_value_of_another_stage_that_is_read_by_no_operation_is_refused(read: Callable[[Tensor], Any]) -> None:
    """It was that of zeros."""
    with pytest.raises(UserError, match="reads, outside its parts, the value of something that another stage computes"):
        simulate_world(2, losses, partial(Counts, read), {"pp": 2, "stages": [["gate"], ["head"]]})


def test_an_error_inside_of_a_part_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fails(self: nn.Linear, x: Tensor) -> Tensor:
        calls.append(1)
        if self.out_features == 4 and len(calls) > 20:
            raise ValueError("the gate is out of order")
        return F.linear(x, self.weight, self.bias)

    monkeypatch.setattr(nn.Linear, "forward", fails)
    with pytest.raises(ValueError, match="the gate is out of order"):
        simulate_world(2, losses, Model, {"pp": 2, "stages": [["up"], ["mixture", "head"]]})


class Broken(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :4])


def test_an_error_of_the_first_stage_is_not_taken_for_one_of_values() -> None:
    """It is given nothing of other stages, which are told of it."""
    with pytest.raises((RuntimeError, UserError), match="cannot be multiplied") as raised:
        simulate_world(2, losses, Broken, {"pp": 2})
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "the forward of stage 0 fails: RuntimeError: " in told and "depends on" not in told

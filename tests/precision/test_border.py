"""What a model is given, and gives its loss, in each precision."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal import Engine, Plan
from shoal.module.border import cast_at_the_border
from shoal.precision import precision
from tests.exchange import teacher


@dataclass(frozen=True)
class Output:
    made: Tensor
    seen: list[Tensor]


class Wraps(nn.Module):
    """Gives its result, and its double, as `form` makes it of them."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(teacher.INPUTS, teacher.OUTPUTS), form

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return self.form(made=y, seen=[2 * y])


def loss(model: nn.Module, mb: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    output = model(mb["inputs"])
    made, (seen,) = (output["made"], output["seen"]) if isinstance(output, dict) else (output.made, output.seen)
    assert made.dtype == seen.dtype == torch.float32
    return (made - mb["targets"]).square().sum() + seen.square().sum(), made.numel()


@pytest.mark.parametrize("form", [dict, Output, SimpleNamespace])
def test_a_loss_is_computed_in_fp32_whatever_the_model_returns(form):
    """What a dataclass held stayed bf16, and so did the sum."""
    engine = Engine(lambda: Wraps(form), loss, teacher.ADAMW, global_batch=16, precision="bf16")
    assert engine.step(next(engine.batches(teacher.data()))).loss > 0
    engine.close()


class Siamese(nn.Module):
    """A tower and a head, which a loss may call by themselves. `once`: False has backward run them again."""

    def __init__(self, once: bool = True) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Sequential(nn.Linear(teacher.INPUTS, 8), nn.Tanh()), nn.Linear(8, 6))
        self.head, self.once = nn.Linear(6, teacher.OUTPUTS), once

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x) if self.once else checkpoint(self.both, x, use_reentrant=False)

    def both(self, x: Tensor) -> Tensor:
        return self.head(self.tower(x).tanh())


def by_parts(model: Any, mb: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    x = mb["inputs"]
    made = model.head(model.tower(x).tanh()) + model(x)
    assert made.dtype in (torch.float32, torch.float64)
    return (made - mb["targets"]).square().sum(), made.numel()


def checkpointed(model: Any, mb: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """What `by_parts` computes, in parts that backward runs again."""
    x = mb["inputs"]
    inside = checkpoint(lambda x: model.tower(x).tanh(), x, use_reentrant=False)
    made = checkpoint(model.head, inside, use_reentrant=False) + checkpoint(model, x, use_reentrant=False)
    assert made.dtype in (torch.float32, torch.float64)
    return (made - mb["targets"]).square().sum(), made.numel()


def whole(model: Any, mb: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    made = 2 * model(mb["inputs"])
    return (made - mb["targets"]).square().sum(), made.numel()


@pytest.mark.parametrize(
    ("precision", "plan", "once"),
    [
        ("fp64", Plan(), True),
        ("bf16", Plan(), False),
        ("bf16", Plan(recompute="full"), False),
        ("bf16", Plan(compile="eager"), True),
        ("fp16", Plan(), True),
    ],
    ids=["fp64", "checkpoint", "recompute", "compile", "fp16"],
)
def test_a_part_that_a_loss_calls_is_given_what_it_computes_with(precision, plan, once):
    """It ended in torch's error on dtypes that differ. What backward runs again is cast as the first time, where the
    loss has checkpointed it, too."""
    losses = []
    for loss in (by_parts, whole, checkpointed):
        engine = Engine(
            partial(Siamese, once), loss, teacher.SGD, plan, global_batch=16, microbatch=8, precision=precision
        )
        losses.append([engine.step(batch).loss for batch in engine.batches(teacher.data(), steps=2)])
        engine.close()
    near = partial(pytest.approx, rel=1e-12 if precision == "fp64" else 2e-3)
    assert losses[0] == near(losses[1]) and losses[2] == near(losses[1])


def test_inside_of_a_copy_of_a_model_nothing_is_cast_either():
    model = Siamese().bfloat16()
    cast_at_the_border(model, precision("bf16"))
    made, inside = deepcopy(model), list[torch.dtype]()
    made.tower.register_forward_hook(lambda _, args, output: inside.append(output.dtype))
    assert made(torch.ones(2, teacher.INPUTS)).dtype == torch.float32 and inside == [torch.bfloat16]
    assert made.tower(torch.ones(2, teacher.INPUTS)).dtype == torch.float32

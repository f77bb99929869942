"""What the model gives its loss under low precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal import Engine
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

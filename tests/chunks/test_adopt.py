"""Tensors that a constructor keeps in several places are one tensor in the trained module too."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal.comm import World
from shoal.engine import Engine
from shoal.models import regression


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.weights = (self.inner.weight,)  # a tuple does not register it
        self.inner.register_buffer("seen", torch.zeros(()))
        self.other.register_buffer("seen", self.inner.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x @ self.weights[0].T)


@pytest.mark.parametrize("ready", [False, True])
def test_attributes_refer_to_the_parameters_and_buffers_that_are_trained(ready):
    model = Keeps() if ready else Keeps
    sgd = partial(torch.optim.SGD, lr=1e-2)
    engine = Engine(model, regression, sgd, global_batch=2, world=World.single("cpu"))
    module = engine.module
    assert module.weights[0] is module.inner.weight
    assert module.inner.seen is module.other.seen
    engine.close()

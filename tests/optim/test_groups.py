"""What an optimizer is given, and what says that it cannot be."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.errors import UserError


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def _frozen() -> nn.Module:
    model = _model()
    for each in model.parameters():
        each.requires_grad_(each.dim() == 2)
    return model


def _loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return module(batch["x"]).square().sum(), len(batch["x"])


@pytest.mark.fast
@pytest.mark.parametrize("factory", [torch.optim.Muon, partial(torch.optim.Muon, lr=0.01)])
def test_muon_is_told_of_parameters_that_are_no_matrices_and_takes_a_model_without(factory):
    with pytest.raises(UserError, match=r"4 parameters are none, such as one of shape \(4,\): give a factory"):
        Engine(_model, _loss, factory, Plan(), global_batch=2)
    engine = Engine(_frozen, _loss, factory, Plan(), global_batch=2)
    before = [each.detach().clone() for each in engine.module.parameters()]
    for batch in engine.batches([{"x": torch.ones(6)}] * 2, steps=1):
        engine.step(batch)
    engine.settle()
    moved = [not torch.equal(one, other) for one, other in zip(before, engine.module.parameters(), strict=True)]
    assert moved == [each.dim() == 2 for each in before]
    engine.close()


@pytest.mark.fast
def test_another_error_of_muon_is_its_own():
    with pytest.raises(ValueError, match="Learning rate"):
        Engine(_frozen, _loss, partial(torch.optim.Muon, lr=-1.0), Plan(), global_batch=2)

"""Adam on the host: the kernel against torch's optimizers and against its own torch form."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine
from shoal.chunks.masters import CompactMasters
from shoal.models import regression
from shoal.optim.fused import host_adam
from shoal.optim.fused.host_adam import adam_update
from tests.beside import trains_as_plain

N = 100_003  # no multiple of a block or of a vector
OPTIONS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def tensors() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    p, g = torch.randn(N, generator=draw), torch.randn(N, generator=draw)
    return p, g, torch.zeros(N), torch.zeros(N)


@pytest.fixture(params=["C", "torch"])
def form(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(host_adam, "library", lambda: None)
    return request.param


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_the_update_is_that_of_torch(form, decoupled, threads):
    p, g, m, v = tensors()
    theirs = torch.nn.Parameter(p.clone())
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], **OPTIONS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for step in range(1, 6):
            theirs.grad = g * step
            optimizer.step()
            adam_update(p, g * step * 8, m, v, step, decoupled=decoupled, grad_factor=0.125, **OPTIONS)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(p, theirs.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(m, optimizer.state[theirs]["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(v, optimizer.state[theirs]["exp_avg_sq"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_weight_decay_is_decoupled_where_the_group_says_so(kind):
    """Adam may have it so, too, and a group of AdamW otherwise."""

    def rule(name: str, parameter: nn.Parameter) -> dict[str, bool]:
        return {"decoupled_weight_decay": parameter.dim() > 1}

    factory = partial(kind, lr=0.1, weight_decay=0.5)
    engine = Engine(lambda: nn.Linear(5, 3), regression, factory, global_batch=4, param_groups=rule)
    assert engine.optimizer.kernel == "Shoal's kernel for the host"

    def optimizer(plain: nn.Module) -> torch.optim.Optimizer:
        return factory([{"params": [each], **rule(name, each)} for name, each in plain.named_parameters()])

    data = [{"inputs": torch.full((5,), 0.1 * i), "targets": torch.ones(3)} for i in range(4)]
    trains_as_plain(engine, nn.Linear(5, 3), optimizer, data)


def test_low_precision_comes_and_goes_in_the_same_pass(form):
    p, g, m, v = tensors()
    low, weights = g.bfloat16(), torch.empty(N, dtype=torch.bfloat16)
    p2, m2, v2 = p.clone(), m.clone(), v.clone()
    adam_update(p, low, m, v, 1, decoupled=True, weights=weights, **OPTIONS)
    adam_update(p2, low.float(), m2, v2, 1, decoupled=True, **OPTIONS)
    assert torch.equal(p, p2) and torch.equal(m, m2) and torch.equal(v, v2)
    assert torch.equal(weights, p.bfloat16())


def test_split_masters_are_updated_as_whole_ones(form):
    p, g, m, v = tensors()
    m2, v2, master = m.clone(), v.clone(), p.clone()
    weights = torch.empty(N, dtype=torch.bfloat16)
    keeper = CompactMasters("split", master, [])
    keeper.close(weights, 0)
    for step in (1, 2, 3):
        adam_update(keeper.rest, g, m, v, step, decoupled=True, weights=weights, **OPTIONS)
        adam_update(p, g, m2, v2, step, decoupled=True, **OPTIONS)
    keeper.open(weights)
    assert torch.equal(master, p) and torch.equal(m, m2) and torch.equal(v, v2)


def test_what_is_not_finite_is_not_hidden(form):
    p, g, m, v = (each[:8].clone() for each in tensors())
    weights = torch.empty(8, dtype=torch.bfloat16)
    g[0], g[1] = float("nan"), float("inf")
    adam_update(p, g, m, v, 1, decoupled=True, weights=weights, **OPTIONS)
    assert (
        p[0].isnan()
        and weights[0].isnan()
        and not v[1].isfinite()
        and p[2:].isfinite().all()
        and weights[2:].isfinite().all()
    )

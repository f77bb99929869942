"""Gradients by name: what a user sees of them, and clipping by a function of their norms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import GPT, GPTConfig, causal_lm
from shoal.plan import Plan
from shoal.training.norms import by_layer
from tests.parity.cases import text
from tests.pool import run_ranks

SGD, STEPS = partial(torch.optim.SGD, lr=2.0, momentum=0.5), 3
MODEL = partial(GPT, GPTConfig(vocab_size=62, sequence=12, layers=2, d_model=16, heads=2, tied=True))


def by_largest(norms: Mapping[str, float]) -> float:
    """So that the largest norm of a parameter is at most 0.05."""
    return min(1.0, 0.05 / max(norms.values()))


def each_alone(norms: Mapping[str, float]) -> dict[str, float]:
    """So that no parameter's norm is above 0.02; and the head stays as it is."""
    return {name: min(1.0, 0.02 / norm) for name, norm in norms.items()} | {next(iter(norms)): 0.0}


def train(world: World, plan: dict[str, Any], rule: Any) -> tuple[list[float], dict[str, Tensor]]:
    plan = {"dp": world.size, **plan}
    options = {
        "global_batch": 8,
        "microbatch": 2,
        "precision": "fp64",
        "clip": rule,
        "keep_gradients": True,
        "world": world,
    }
    running = Engine(MODEL, causal_lm, SGD, Plan(**plan), **options)
    with pytest.raises(UserError, match="ask after a step"):
        running.gradients()
    losses = [running.step(batch).loss for batch in running.batches(text(), steps=STEPS)]
    gradients = running.gradients()
    running.close()
    return losses, gradients


@cache
def plainly(rule: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The same by torch on one process."""
    running = Engine(
        MODEL, causal_lm, SGD, global_batch=8, microbatch=8, precision="fp64", world=World.single(torch.device("cpu"))
    )
    module = MODEL().double()
    module.load_state_dict({name: each.clone() for name, each in running.module.state_dict().items()})
    optimizer, losses = SGD(module.parameters()), []
    for batch in running.batches(text(), steps=STEPS):
        optimizer.zero_grad()
        total, count = causal_lm(module, batch.load(batch.ids))
        (total / count).backward()
        losses.append(float(total / count))
        seen = {name: each.grad.clone() for name, each in module.named_parameters()}
        answer = rule({name: float(each.norm()) for name, each in seen.items()})
        for name, each in module.named_parameters():
            each.grad.mul_(answer if isinstance(answer, float) else answer.get(name, 1.0))
        optimizer.step()
    running.close()
    return losses, seen


CUTS = [
    (1, {}),
    (2, {}),
    (2, {"zero": 1}),
    (2, {"zero": 3}),
    (2, {"dp": 1, "tp": 2}),
    (2, {"dp": 1, "pp": 2}),
    (1, {"memory": {"update": "deferred"}}),
]


@pytest.mark.parametrize("rule", [by_largest, each_alone])
@pytest.mark.parametrize(("size", "plan"), CUTS)
def test_clipping_by_a_function_and_gradients_by_name(size, plan, rule):
    losses, gradients = plainly(rule)
    shown: set[str] = set()
    for found, theirs in run_ranks(train, size, plan, rule):
        assert found == pytest.approx(losses, rel=1e-9)
        shown |= theirs.keys()
        for name, value in theirs.items():
            if value.shape == gradients[name].shape:
                torch.testing.assert_close(value, gradients[name], rtol=1e-7, atol=1e-11)
    assert shown == gradients.keys()


def norms_of(world: World, plan: dict[str, Any]) -> list[tuple[float, Mapping[str, float]]]:
    plan = {"dp": world.size, **plan}
    options = {"global_batch": 8, "microbatch": 2, "precision": "fp64", "clip": 0.05, "norms_every": 2, "world": world}
    running = Engine(MODEL, causal_lm, SGD, Plan(**plan), **options)
    results = [running.step(batch) for batch in running.batches(text(), steps=4)]
    running.close()
    return [(result.grad_norm, result.norms) for result in results]


@cache
def norms_alone() -> list[Mapping[str, float]]:
    """Those of whole gradients, on one process."""
    options = {
        "global_batch": 8,
        "precision": "fp64",
        "clip": 0.05,
        "keep_gradients": True,
        "world": World.single(torch.device("cpu")),
    }
    running = Engine(MODEL, causal_lm, SGD, **options)
    found = []
    for batch in running.batches(text(), steps=4):
        running.step(batch)
        found.append({name: float(each.norm()) for name, each in running.gradients().items()})
    running.close()
    return found


WIDER = (4, {"dp": 2, "cp": 2, "zero": 2}), (4, {"dp": 2, "tp": 2, "zero": 3}), (4, {"dp": 2, "pp": 2, "zero": 1})


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        *CUTS[:1],
        (2, {"zero": 2}),
        (4, {"zero": 1, "shard": 2}),
        *CUTS[3:],
        *(pytest.param(*each, marks=pytest.mark.matrix) for each in WIDER),
    ],
)
def test_norms_by_name_are_of_all_that_grad_norm_is_of(size, plan):
    for found in run_ranks(norms_of, size, plan):
        assert [bool(norms) for _, norms in found] == [False, True, False, True]
        for (norm, norms), alone in zip(found[1::2], norms_alone()[1::2], strict=True):
            assert norms == pytest.approx(alone, rel=1e-7, abs=1e-11)
            assert math.hypot(*norms.values()) == pytest.approx(norm, rel=1e-12)


def test_norms_under_loss_scaling_are_in_the_unit_of_the_mean_loss():
    options = {
        "global_batch": 8,
        "precision": {"name": "fp16", "initial_scale_power": 20, "hysteresis": 1},
        "norms_every": 1,
    }
    running = Engine(
        MODEL, causal_lm, partial(torch.optim.SGD, lr=0.0), world=World.single(torch.device("cpu")), **options
    )
    results = [running.step(batch) for batch in running.batches(text(), steps=10)]
    running.close()
    assert {result.skipped for result in results} == {True, False}
    for result in results:
        broken = any(not math.isfinite(norm) for norm in result.norms.values())
        assert broken == result.skipped
        assert broken or math.hypot(*result.norms.values()) == pytest.approx(result.grad_norm, rel=1e-5)


def test_norms_of_a_layer_are_those_of_its_parameters_together():
    norms = {
        "embed.weight": 2.0,
        "blocks.3.attn.q.weight": 3.0,
        "blocks.3.mlp.experts.1.up": 4.0,
        "scale": 1.0,
        "layer1.0.conv.weight": 5.0,
    }
    assert by_layer(norms) == {"embed": 2.0, "blocks.3": 5.0, "scale": 1.0, "layer1.0": 5.0}


def wrong(norms: Mapping[str, float]) -> dict[str, float]:
    return {"nothing.weight": 1.0}


@pytest.mark.parametrize(
    ("rule", "plan", "why"),
    [
        (wrong, {}, "clip gave a factor for nothing.weight"),
        (lambda norms: float("nan"), {}, "clip gave nan"),
        (
            by_largest,
            {"exchange": {"name": "diloco", "every": 2}},
            '"diloco" leaves each replica a gradient of its own',
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(rule, plan, why):
    with pytest.raises(UserError, match=why):
        train(World.single(torch.device("cpu")), plan, rule)


@pytest.mark.parametrize(
    ("norms_every", "exchange", "why"),
    [
        (2, "decentralized", 'norms_every takes .* "decentralized" leaves'),
        (-1, "allreduce", "norms_every = -1: give 0 or more"),
        (True, "allreduce", "whole number"),
    ],
)
def test_norms_that_ranks_would_not_have_alike_are_refused(norms_every, exchange, why):
    options = {"global_batch": 8, "norms_every": norms_every, "world": World.single(torch.device("cpu"))}
    with pytest.raises(UserError, match=why):
        Engine(MODEL, causal_lm, SGD, Plan(exchange=exchange), **options)

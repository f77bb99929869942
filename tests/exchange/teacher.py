"""A student network that learns a teacher's outputs: small, convex enough to compare algorithms on, quick enough for
many of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm import World
from shoal.models import regression

INPUTS, HIDDEN, OUTPUTS, SAMPLES, GLOBAL_BATCH = 12, 24, 4, 96, 16


def student() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)
    )


def data(samples: int = SAMPLES) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(samples, INPUTS, generator=draw)
    first, second = torch.randn(INPUTS, HIDDEN, generator=draw), torch.randn(HIDDEN, OUTPUTS, generator=draw)
    y = torch.tanh(x @ first / INPUTS**0.5) @ second / HIDDEN**0.5
    return [{"inputs": a, "targets": b} for a, b in zip(x, y, strict=True)]


@dataclass(frozen=True)
class Trace:
    """One rank's run: losses and norms by step, the final weights and the loss over all samples."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    evaluation: float


ADAMW = partial(torch.optim.AdamW, lr=1e-2)
SGD = partial(torch.optim.SGD, lr=0.05)


def engine(world: World, exchange: Any, optimizer: Any = ADAMW, zero: int = 0, **more: Any) -> Engine:
    options: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "microbatch": 2, "dropout": "fused", "clip": 1.0, **more}
    return Engine(
        student, regression, optimizer, Plan(dp=world.size, exchange=exchange, zero=zero), world=world, **options
    )


def train(world: World, exchange: Any, steps: int = 20, optimizer: Any = ADAMW, **more: Any) -> Trace:
    torch.set_num_threads(1)
    running = engine(world, exchange, optimizer, **more)
    try:
        results = [running.step(batch) for batch in running.batches(data(), steps=steps)]
        evaluation = running.evaluate(data()).loss
        with running.whole_weights():
            weights = {name: parameter.detach().clone() for name, parameter in running.parameters.items()}
        return Trace([r.loss for r in results], [r.grad_norm for r in results], weights, evaluation)
    finally:
        running.close()

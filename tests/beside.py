"""An engine beside a loop of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal import Engine
from shoal.models import regression


def trains_as_plain(
    engine: Engine, plain: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer], data: list[Any]
) -> None:
    """Trains both for 4 steps from the engine's weights, and closes the engine: their weights are equal then."""
    with torch.no_grad():
        for name, value in plain.named_parameters():
            value.copy_(engine.parameters[name])
    made = optimizer(plain)
    for batch in engine.batches(data, steps=4):
        total, count = regression(plain, batch.load(batch.ids))
        made.zero_grad()
        (total / count).backward()
        made.step()
        engine.step(batch)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(engine.parameters[name].detach(), value.detach(), rtol=1e-4, atol=1e-5)
    engine.close()

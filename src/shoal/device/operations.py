"""What an operation takes beside its work: alone, and in a model of small layers, with autograd's part and that of the
modules around it in Python."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.device.timing import quickest

WIDTH, LAYERS, TRIALS = 16, 24, 10
COUNTED = 5
"""Operations of a layer in forward, as the planner counts them: a norm, two products, an activation, an addition."""
ALONE = 200
"""Operations one after the other."""
COLD_LAYERS, COLD_TRIALS, SIDE, PRODUCTS = 2, 15, 512, 4
"""Layers and trials where products come before, which have so many rows and columns; how many of them."""


class _Layer(nn.Module):
    """A block of a transformer without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def measure_operations(device: torch.device) -> float:
    """Seconds of one of the operations of a few small layers on a row, in a few hundredths of a second. A backward
    counts as twice the operations of its forward."""
    work = _work(LAYERS, device)
    work()  # the first one is not timed
    return quickest(device, TRIALS, work) / (3 * COUNTED * LAYERS)


def _work(layers: int, device: torch.device) -> Callable[[], None]:
    """Returns what runs so many small layers on a row, forward and backward."""
    with torch.random.fork_rng(devices=[]):  # what is measured draws nothing from what a run goes on with
        model = nn.Sequential(*(_Layer() for _ in range(layers))).to(device)
    x = torch.ones(1, WIDTH, device=device)

    def work() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return work


class OnceMore:
    """Python that comes once in a while: the operations of a few small layers, forward and backward, by the time that
    they keep a core. `repeated`: seconds of them where nothing comes between."""

    def __init__(self) -> None:
        self._work = _work(COLD_LAYERS, torch.device("cpu"))
        self.seconds()  # the first one is not timed
        self.repeated = min(self.seconds() for _ in range(COLD_TRIALS))

    def seconds(self) -> float:
        """What they take now, of this thread on a core."""
        began = time.thread_time()
        self._work()
        return time.thread_time() - began


def measure_cold() -> float:
    """How many times longer Python keeps a core that comes once between large products, its code and data in none of
    the core's caches, than where it is repeated: as what a step does once between the products of a model."""
    python, square = OnceMore(), torch.ones(SIDE, SIDE)

    def after_products() -> float:
        for _ in range(PRODUCTS):
            square @ square
        return python.seconds()

    return max(1.0, statistics.median(after_products() for _ in range(COLD_TRIALS)) / python.repeated)


def measure_shortest(device: torch.device) -> float:
    """Seconds of the shortest operation, alone: additions of a few numbers."""
    small = torch.ones(WIDTH, device=device)

    def work() -> None:
        value = small
        for _ in range(ALONE):
            value = value + 1.0

    work()  # the first one is not timed
    return quickest(device, TRIALS, work) / ALONE

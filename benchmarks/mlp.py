"""What the contenders of `links` and `straggler` train: an MLP of 8 layers, 1024 wide, 8.4M parameters, on 64 rows a
rank.

33.6 MB of gradients for some tens of milliseconds of one core's work: as communication-heavy as it gets, so that links
show.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.processes import Step
from shoal import Engine, Plan
from shoal.models.losses import LossResult, Microbatch, regression
from shoal.models.mlp import MLP
from shoal.plan import Option

WIDTH, LAYERS = 1024, 8
ROWS = 64
"""A rank's rows of a step."""

SAMPLES = 512
LEARNING_RATE = 1e-4

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """SAMPLES random pairs of inputs and targets, the same on every rank."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.targets = torch.randn(SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


def build_mlp() -> MLP:
    """The model, with the same weights on every rank and for every contender."""
    torch.manual_seed(0)
    return MLP([WIDTH] * (LAYERS + 1), "relu")


def shoal(exchange: Option, delays_ms: tuple[float, ...] = ()) -> Step:
    """Shoal's engine with plan.exchange = `exchange`. `delays_ms`: how long each rank sleeps in a step; none, if it is
    empty."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loss = partial(_late_regression, delays_ms[rank] / 1e3) if delays_ms else regression
    engine = Engine(
        build_mlp,
        loss,
        partial(torch.optim.AdamW, lr=LEARNING_RATE, fused=True),
        Plan(dp=ranks, exchange=exchange),
        global_batch=ROWS * ranks,
    )
    batches = engine.batches(Rows())
    return lambda: engine.step(next(batches))


def ddp(hook: Hook | None = None) -> Step:
    """torch DDP on gloo, its default buckets, gradients as views of them; `hook`: one of its communication hooks."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(build_mlp(), gradient_as_bucket_view=True, static_graph=True)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    rows = Rows()
    starts = itertools.cycle(range(rank * ROWS, SAMPLES, ranks * ROWS))

    def step() -> None:
        start = next(starts)
        inputs, targets = rows.inputs[start : start + ROWS], rows.targets[start : start + ROWS]
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _late_regression(seconds: float, model: nn.Module, microbatch: Microbatch) -> LossResult:
    """The loss of a rank that is slow: its core does nothing for so long."""
    time.sleep(seconds)
    return regression(model, microbatch)

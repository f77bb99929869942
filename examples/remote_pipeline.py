"""Trains a convolution net in two stages that are in two other processes, with microbatches in flight at once.

    python examples/remote_pipeline.py

While the second stage has one microbatch, the first has the next one; so it is in backward.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.server.remote import local_owners

SIDE, CLASSES, BATCH, WIDTH = 24, 4, 32, 16


def first_stage() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, WIDTH, 5), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 5), nn.ReLU())


def second_stage() -> nn.Module:
    left = ((SIDE - 8) // 2) ** 2
    return nn.Sequential(
        nn.Conv2d(WIDTH, WIDTH, 5, padding=2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(WIDTH * left, CLASSES)
    )


FACTORIES = [first_stage, second_stage]


def images(step: int) -> tuple[Tensor, Tensor]:
    """Stripes in one of CLASSES directions, with noise: [BATCH, 1, SIDE, SIDE], and their directions."""
    draw = torch.Generator().manual_seed(step)
    wanted = torch.randint(CLASSES, (BATCH,), generator=draw)
    angle = (wanted * (torch.pi / CLASSES)).view(-1, 1, 1)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    phase = 6.3 * torch.rand(BATCH, 1, 1, generator=draw)
    stripes = torch.sin(x * angle.cos() + y * angle.sin() + phase)
    return (stripes + torch.randn(BATCH, SIDE, SIDE, generator=draw)).unsqueeze(1), wanted


def train(addresses: Sequence[str], token: str, steps: int, microbatches: int = 4) -> list[float]:
    """Returns the loss of each step."""
    stages = (
        shoal.remote(addresses[0], first_stage, token=token, seed=0),
        shoal.remote(addresses[-1], second_stage, token=token, seed=1),
    )
    optimizer = shoal.DistributedOptimizer("adamw", stages, lr=2e-3)

    def run(given: Tensor, wanted: Tensor) -> float:
        loss = F.cross_entropy(stages[1](stages[0](given)), wanted, reduction="sum") / BATCH
        loss.backward()
        return loss.item()

    losses = []
    with ThreadPoolExecutor(microbatches) as threads:
        for step in range(steps):
            given, wanted = images(step)
            with shoal.context() as context:
                parts = zip(given.chunk(microbatches), wanted.chunk(microbatches), strict=True)
                under_way = [threads.submit(contextvars.copy_context().run, run, *part) for part in parts]
                losses.append(sum(each.result() for each in under_way))
                optimizer.step(context)
            if step % 10 == 0:
                print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main() -> None:
    with local_owners(FACTORIES, 2) as (addresses, token):
        losses = train(addresses, token, 40)
    print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {len(losses)} steps")


if __name__ == "__main__":
    main()

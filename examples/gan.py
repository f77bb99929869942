"""Trains two models against each other: a generator learns to draw points of a ring, a critic to tell them from true
ones.

Each model has an engine of its own, with its own optimizer; a step of one, then a step of the other. Both take the same
global batch, a step number of their own, and any number of ranks:

    python examples/gan.py
    shoal run examples/gan.py --nproc 2
"""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import shoal
from shoal.comm import World
from shoal.launch import join

NOISE = 4


class Ring:
    """A map-style dataset: point `i` of the ring, and the noise of which the generator makes one, are functions of
    `i`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        angle = 2 * math.pi * torch.rand((), generator=draw)
        return {"point": torch.stack([angle.cos(), angle.sin()]), "noise": torch.randn(NOISE, generator=draw)}


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def train(world: World, steps: int) -> dict[str, float]:
    """The last losses of both, and how far from the ring's radius drawn points are on average."""
    adam = partial(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.9))
    options = {"global_batch": 64, "microbatch": 16, "world": world}  # both run on the same ranks

    def critics_loss(critic: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
        with torch.no_grad():
            drawn = generator.module(mb["noise"])
        true, false = critic(torch.cat([mb["point"], drawn])).flatten().chunk(2)
        return (F.softplus(-true) + F.softplus(false)).sum(), len(true)

    def generators_loss(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
        constants = {name: parameter.detach() for name, parameter in critic.module.named_parameters()}
        score = functional_call(critic.module, constants, (model(mb["noise"]),))
        return F.softplus(-score).sum(), len(score)

    generator = shoal.Engine(partial(network, NOISE, 2), generators_loss, adam, seed=0, **options)
    critic = shoal.Engine(partial(network, 2, 1), critics_loss, adam, seed=1, **options)
    data = Ring(4096)
    for for_critic, for_generator in zip(
        critic.batches(data, steps=steps), generator.batches(data, steps=steps), strict=True
    ):
        critics, generators = critic.step(for_critic), generator.step(for_generator)
    with torch.no_grad():
        drawn = generator.module(torch.stack([data[i]["noise"] for i in range(512)]))
    found = {"critic": critics.loss, "generator": generators.loss, "off": float((drawn.norm(dim=1) - 1).abs().mean())}
    if world.rank == 0:
        print(", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    critic.close()
    generator.close()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    train(join(), parser.parse_args().steps)

"""Trains a small network on what a larger one, which is frozen, says: knowledge distillation.

The teacher is trained first, by an engine of its own. Then it stands beside the student, whose loss calls it:

    python examples/distil.py
    shoal run examples/distil.py --nproc 2
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.comm import World
from shoal.launch import join

CLASSES, TEMPERATURE = 4, 2.0


class Spirals:
    """A map-style dataset: points of interleaved spirals, sample `i` a function of `i`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw, label = torch.Generator().manual_seed(index), index % CLASSES
        radius = torch.rand((), generator=draw)
        angle = 4 * radius + 2 * torch.pi * label / CLASSES + 0.1 * torch.randn((), generator=draw)
        return {"point": 2 * radius * torch.stack([angle.cos(), angle.sin()]), "label": torch.tensor(label)}


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES))


def by_label(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(mb["point"]), mb["label"], reduction="sum"), len(mb["label"])


def accuracy(model: nn.Module, data: Spirals) -> float:
    samples = [data[i] for i in range(512)]
    with torch.no_grad():
        said = model(torch.stack([each["point"] for each in samples])).argmax(1)
    return float((said == torch.stack([each["label"] for each in samples])).float().mean())


def train(world: World, steps: int) -> dict[str, float]:
    """The student's last loss, and how often teacher and student are right."""
    data = Spirals(4096)
    adam, options = partial(torch.optim.Adam, lr=1e-2), {"global_batch": 64, "microbatch": 16, "world": world}
    teacher = shoal.Engine(partial(network, 64), by_label, adam, seed=0, **options)
    for batch in teacher.batches(data, steps=steps):
        teacher.step(batch)

    def as_the_teacher(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, int]:
        with torch.no_grad():
            wanted = F.softmax(teacher.module(mb["point"]) / TEMPERATURE, 1)
        said = F.log_softmax(model(mb["point"]) / TEMPERATURE, 1)
        return TEMPERATURE**2 * F.kl_div(said, wanted, reduction="sum"), len(said)

    student = shoal.Engine(partial(network, 12), as_the_teacher, adam, seed=1, **options)
    for batch in student.batches(data, steps=steps):
        out = student.step(batch)
    found = {"loss": out.loss, "teacher": accuracy(teacher.module, data), "student": accuracy(student.module, data)}
    if world.rank == 0:
        print(", ".join(f"{name} {value:.4f}" for name, value in found.items()))
    student.close()
    teacher.close()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    train(join(), parser.parse_args().steps)

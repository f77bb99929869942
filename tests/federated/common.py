"""A small set whose classes a linear model tells apart, and clients of it."""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor, nn

from shoal.device import CPU
from shoal.federated.clients import Clients, clients_of
from shoal.federated.partition import Shares, by_label
from shoal.federated.recipe import Recipe
from shoal.federated.settings import Federated
from shoal.federated.simulation import Simulation
from shoal.models import MLP, classification

SAMPLES, INPUTS, CLASSES = 240, 6, 3


@cache
def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, INPUTS, generator=generator)
    labels = (inputs @ torch.randn(INPUTS, CLASSES, generator=generator)).argmax(dim=1)
    return [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


def labels():
    return torch.stack([each["labels"] for each in samples()]).numpy()


def right(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    found = model(mb["inputs"]).argmax(dim=-1) == mb["labels"]
    return found.sum(), torch.tensor(found.numel())


def recipe(optimizer=torch.optim.SGD, model=None, **options) -> Recipe:
    return Recipe(
        model or partial(MLP, [INPUTS, 8, CLASSES], "tanh"),
        options.pop("loss", classification),
        partial(optimizer, lr=0.1),
        **{"batch": 8, "measure": right, **options},
    )


def clients(number: int, alpha: float = 0.5, validation: float = 0.2, shares: Shares | None = None) -> Clients:
    dealt = by_label(labels(), number, alpha, 0) if shares is None else shares
    return clients_of(samples(), dealt, validation, 0, CPU)


def simulation(settings: Federated, given: Recipe | None = None, **options) -> Simulation:
    return Simulation(given or recipe(), clients(settings.clients, **options), settings)

"""Federated training in one process: clients in groups, a streamed mean, the outer optimizer, one round after the
other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.device import CPU, keep_generators
from shoal.errors import TrainingError, UserError
from shoal.federated.aggregate import Aggregate
from shoal.federated.clients import Clients
from shoal.federated.evaluation import Evaluation, Measured
from shoal.federated.flat import Flat
from shoal.federated.local import LocalTraining
from shoal.federated.recipe import Recipe, Trained
from shoal.federated.schedule import Round, Task, crowd_of, in_groups, schedule_of
from shoal.federated.settings import Federated
from shoal.federated.strategies import strategy_named


@dataclass(frozen=True)
class Result:
    """A round that has been.

    loss: mean over the local steps of all results; None where there was none.
    samples: on which they trained. broken: clients whose result was not finite, and does not count.
    applied: whether the global model was updated. seconds: that it took in truth.
    """

    round: Round
    loss: float | None
    samples: int
    broken: int
    applied: bool
    seconds: float


class Interrupted(Exception):
    """A round was given up, as it was asked to be; the model is that of the round before."""


class Federation(Protocol):
    """A global model and its clients, round after round: a `Simulation`, or one whose clients are real.

    number: rounds so far. weights: the global model as a vector. why: clients train one by one; "" if together.
    """

    recipe: Recipe
    settings: Federated
    flat: Flat
    number: int
    why: str

    @property
    def weights(self) -> Tensor: ...
    @property
    def members(self) -> int:
        """Number of clients."""

    def round(self) -> Result: ...
    def evaluate(self) -> Measured | None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...
    def load(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None: ...


class Simulation:
    """Clients that train `recipe` under `settings`, and the global model. `why`: they train one by one; "" if together.

    Memory does not grow with the number of clients that are asked: it is that of one group of them, of one sum, of the
    outer optimizer's state, and of the versions of the weights that asynchronous clients began from.
    """

    def __init__(self, recipe: Recipe, clients: Clients, settings: Federated, device: torch.device = CPU) -> None:
        self.recipe, self.clients, self.settings = recipe, clients, settings
        at_once = max(1, round(settings.fraction * clients.number))
        if settings.least > at_once:
            raise UserError(
                f"federated.least = {settings.least}, but of {clients.number} clients a round asks {at_once}"
            )
        self.strategy = strategy_named(settings.strategy)
        self.local = LocalTraining(recipe, clients, settings.buffer or at_once, self.strategy.mu, device)
        self.flat, self.module, self.why = self.local.flat, self.local.module, self.local.why
        crowd = crowd_of(settings, clients.train.counts, recipe.batch, recipe.seed)
        self.schedule = schedule_of(settings, crowd)
        start = self.local.start()
        self.versions: dict[int, Tensor] = {0: start}
        slots = self.strategy.outer.slots
        self.outer = {slot: torch.zeros(self.flat.weights, dtype=start.dtype, device=device) for slot in slots}
        self.number = 0
        self._evaluation = Evaluation(self.module, clients.held_out, recipe.loss, recipe.measure)

    @property
    def weights(self) -> Tensor:
        """The global model as a vector (see Flat)."""
        return self.versions[self.number]

    @property
    def members(self) -> int:
        """Number of clients."""
        return self.clients.number

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the global model by name."""
        return self.flat.state(self.weights)

    def round(self) -> Result:
        """Has the clients of the next round train, and updates the global model."""
        began = time.perf_counter()
        plan = self.schedule.draw(self.number + 1)
        total = Aggregate(self.flat.size, self.weights.device)
        losses = counts = 0.0
        broken = samples = 0
        with keep_generators({self.weights.device}):
            for group in in_groups(plan.tasks, self.local.size):
                found = self._train(group)
                fine = torch.isfinite(found.moved).all(dim=1)
                if not bool(fine.all()):
                    broken += int((~fine).sum())
                    found.moved[~fine] = 0
                weights = self._weights_of(group) * fine
                total.add(found.moved, weights, torch.tensor([task.factor for task in group], device=fine.device))
                losses += float(found.losses[fine].sum())
                counts += float(found.counts[fine].sum())
                samples += sum(task.steps for task in group) * self.recipe.batch
        good = len(plan.tasks) - broken
        if broken and not good:
            raise TrainingError(
                f"round {plan.number}: no client has come to finite weights. A lower train.lr, or train.clip, is the "
                "remedy"
            )
        applied = good >= self.settings.least
        self._update(total if applied else None)
        mean = losses / counts if counts else None
        return Result(plan, mean, samples, broken, applied, time.perf_counter() - began)

    def _train(self, group: list[Task]) -> Trained:
        bases = {task.base for task in group}
        starts = (
            self.versions[group[0].base]
            if len(bases) == 1
            else torch.stack([self.versions[task.base] for task in group])
        )
        found = self.local.train(group, starts, self.recipe.rate(self.number))
        # buffers are no sum of movements: a variance of the newest version less one of an older may be below 0
        found.moved[:, self.flat.weights :] += (self.weights - starts)[..., self.flat.weights :]
        return found

    def _weights_of(self, group: list[Task]) -> Tensor:
        device = self.weights.device
        if self.settings.weighting == "equal":
            return torch.ones(len(group), dtype=torch.float64, device=device)
        counts = self.clients.train.counts[[task.client for task in group]]
        return torch.from_numpy(counts).double().to(device)

    @torch.no_grad()
    def _update(self, total: Aggregate | None) -> None:
        """Makes the next version of the global model; without results it is the last one again."""
        now = self.weights.clone()
        if total is not None:
            moved = total.mean(now.dtype)
            self.strategy.outer.step(now[: self.flat.weights], moved[: self.flat.weights], self.outer)
            now[self.flat.weights :] -= moved[self.flat.weights :]
            if not bool(torch.isfinite(now).all()):
                raise TrainingError(
                    f"round {self.number + 1}: the global model is not finite after the update. A lower train.lr, or "
                    "a lower lr of federated.strategy, is the remedy"
                )
        self.number += 1
        self.versions[self.number] = now
        kept = self.schedule.needed(self.number)
        self.versions = {version: each for version, each in self.versions.items() if version in kept}

    @torch.no_grad()
    def evaluate(self) -> Measured | None:
        """Measures the global model on what clients hold out; None where none of them does."""
        self.local.put(self.weights)
        return self._evaluation()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns all that the next rounds depend on: tensors by name, and what JSON can hold."""
        tensors = {f"weights/{version}": each for version, each in self.versions.items()}
        tensors |= {f"outer/{slot}": each for slot, each in self.outer.items()}
        return tensors, {"number": self.number, "schedule": self.schedule.state()}

    def load(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """Takes over what `state` has returned."""
        device = self.weights.device
        self.number = int(rest["number"])
        found = {name: each.to(device, copy=True) for name, each in tensors.items()}
        self.versions = {
            int(name.partition("/")[2]): each for name, each in found.items() if name.startswith("weights/")
        }
        self.outer = {name.partition("/")[2]: each for name, each in found.items() if name.startswith("outer/")}
        self.schedule.load(rest["schedule"])

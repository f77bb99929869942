"""Rounds in one process under Flower's strategies: as `shoal.federated.simulation`, but for who updates the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.data.keyed import derive_key
from shoal.device import CPU
from shoal.errors import TrainingError, UserError
from shoal.federated.clients import Clients
from shoal.federated.flower import private
from shoal.federated.flower.buffered import FedBuff
from shoal.federated.flower.clients import SimulatedClients, to_record, to_vector
from shoal.federated.flower.grid import FIRST, LocalGrid
from shoal.federated.flower.strategies import OPTIMIZERS, flower_strategy
from shoal.federated.local import LocalTraining
from shoal.federated.recipe import Recipe
from shoal.federated.schedule import Round, Rounds, Task
from shoal.federated.settings import Federated
from shoal.federated.simulation import Result, Simulation

from flwr.app import ConfigRecord, Message  # isort: skip
from flwr.serverapp.strategy import Strategy  # isort: skip


class FlowerSimulation(Simulation):
    """Clients that train `recipe` under `settings`, where a strategy of Flower's asks them and updates the model."""

    def __init__(self, recipe: Recipe, clients: Clients, settings: Federated, device: torch.device = CPU) -> None:
        private.quieten()
        self._flower = flower_strategy(settings, clients.number)
        super().__init__(recipe, clients, replace(settings, strategy="fedavg", buffer=0, most_stale=None), device)
        self._given = settings
        if isinstance(self._flower, FedBuff):
            self._flower.weights = self.flat.weights
        self._asked = max(1, round(settings.fraction * clients.number))
        local = SimulatedClients(self._local)
        assert isinstance(self.schedule, Rounds)
        self._grid = LocalGrid(local.app(), self.schedule, local.many)

    def _local(self, mu: float) -> LocalTraining:
        return self.local if mu == 0 else LocalTraining(self.recipe, self.clients, self._asked, mu, self.local.device)

    def round(self) -> Result:
        began, number = time.perf_counter(), self.number + 1
        arrays = to_record(self.weights)
        if isinstance(self._flower, FedBuff):
            since = self._grid.clock
            updated = self._flower.update(self._grid, number, arrays)
            plan = _round_of(number, self._flower, self._grid.clock - since)
            good, applied = self._flower.replies, True
        else:
            with private.drawn_by(derive_key("flower", self.recipe.seed, number)):
                messages = list(self._flower.configure_train(number, arrays, ConfigRecord(), self._grid))
            replies = self._grid.send_and_receive(messages)
            plan, good = self._grid.past[-1], [reply for reply in replies if not reply.has_error()]
            if plan.tasks and not good:
                raise TrainingError(
                    f"round {number}: no client has come to finite weights. A lower train.lr, or train.clip, is the "
                    "remedy"
                )
            applied = len(good) >= self._given.least
            updated = self._flower.aggregate_train(number, replies)[0] if applied else None
            applied = updated is not None
        self.number = number
        before = self.versions[max(self.versions)]
        if updated is not None:
            before = with_mean_of_buffers(to_vector(updated, before), self._flower, good, self.flat.weights)
        self.versions = {number: before}
        samples = sum(task.steps for task in plan.tasks) * self.recipe.batch
        taken = time.perf_counter() - began
        return Result(plan, mean_loss(good), samples, len(plan.tasks) - len(good), applied, taken)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        memory = {f"strategy/{name}": torch.from_numpy(each) for name, each in private.memory_of(self._flower).items()}
        return {f"weights/{self.number}": self.weights, **memory}, {"number": self.number, "schedule": {}}

    def load(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        if rest["number"] and self._given.buffer:
            raise UserError(
                "the clients that FedBuff has at work are those of its own process, so no other one can go on with its "
                "rounds: give another run.dir, or leave --flower out"
            )
        super().load(tensors, rest)
        remember_in(self._flower, tensors, self.weights)
        self._grid.begin_after(self.number)


def remember_in(strategy: Strategy, tensors: Mapping[str, Tensor], weights: Tensor) -> None:
    """Gives a new strategy what `tensors` of a saved state say of it."""
    own = {name.removeprefix("strategy/"): each.numpy() for name, each in tensors.items() if "strategy/" in name}
    private.remember(strategy, own, to_record(weights))


def with_mean_of_buffers(new: Tensor, strategy: Strategy, replies: Sequence[Message], weights: int) -> Tensor:
    """Returns a new global model of so many `weights`, whose buffers behind them are the mean of the clients', whatever
    optimizer the strategy has made the update by: with momentum a variance may come to be below 0."""
    if not isinstance(strategy, OPTIMIZERS) or weights == len(new):
        return new
    counts = [float(record["num-examples"]) for reply in replies for record in reply.content.metric_records.values()]
    each = torch.stack([to_vector(reply.content["arrays"], new)[weights:] for reply in replies]).double()
    mean = torch.tensor(counts, dtype=torch.float64) @ each.cpu() / sum(counts)
    return torch.cat([new[:weights], mean.to(new)])


def mean_loss(replies: list[Message]) -> float | None:
    """Returns the mean of the clients' losses, weighted by their samples."""
    metrics = [record for reply in replies for record in reply.content.metric_records.values()]
    whole = sum(float(each["num-examples"]) for each in metrics)
    return sum(float(each["num-examples"]) * float(each["loss"]) for each in metrics) / whole if whole else None


def _round_of(number: int, strategy: FedBuff, seconds: float) -> Round:
    stale = tuple(age for age, count in sorted(strategy.stale.items()) for _ in range(count))
    tasks = tuple(Task(reply.metadata.src_node_id - FIRST, 0, number - 1, number) for reply in strategy.replies)
    return Round(number, tasks, strategy.asked, strategy.lost, 0, 0, stale, seconds)

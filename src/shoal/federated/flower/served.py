"""Rounds whose clients are real: a strategy of Flower's asks them over a SuperLink of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.keyed import derive_key
from shoal.errors import TrainingError, UserError
from shoal.federated.evaluation import Measured
from shoal.federated.flat import Flat, initial_module
from shoal.federated.flower import private
from shoal.federated.flower.buffered import FedBuff
from shoal.federated.flower.clients import WEIGHTS, to_vector
from shoal.federated.flower.link import LinkGrid
from shoal.federated.flower.mesh import CUT, SECONDS
from shoal.federated.flower.private.superlink import SuperLink
from shoal.federated.flower.secure_sum import SecureSum
from shoal.federated.flower.simulation import mean_loss, remember_in, with_mean_of_buffers
from shoal.federated.flower.strategies import flower_strategy
from shoal.federated.recipe import Recipe
from shoal.federated.schedule import Round, Task
from shoal.federated.settings import Federated
from shoal.federated.simulation import Result

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # isort: skip
from flwr.serverapp.strategy import Strategy  # isort: skip

MEASURE_SECONDS = 600.0
"""The longest that a client may take to measure the weights."""
STAGE_SECONDS = 600.0
"""The longest that a client may take to answer a stage of secure aggregation, where a round has no deadline."""


class Served:
    """The global model, and the rounds of the clients of `link`.

    deadline: seconds of a round, None for however long it takes; then results are dropped, or with `settings.late` =
    "partial" clients end their local steps early. at_first: clients that are there before the first round.
    stopped: see LinkGrid. say: shows a line.

    Of the settings it takes `rounds`, `clients`, `fraction`, `strategy`, `late`, `least`, `buffer`, `most_stale` and
    `secure`.
    """

    why = ""

    def __init__(
        self,
        recipe: Recipe,
        settings: Federated,
        link: SuperLink,
        deadline: float | None,
        at_first: int,
        stopped: Callable[[], bool],
    ) -> None:
        self.recipe, self.settings, self._link, self._deadline = recipe, settings, link, deadline
        self._at_first = at_first
        self.say: Callable[[str], None] = print
        self._grid = LinkGrid(link, stopped)
        self._inner: Strategy = flower_strategy(replace(settings, deadline=None), settings.clients)
        self._strategy = self._inner
        least = settings.least if settings.secure is None else max(2, settings.least)
        if not isinstance(self._inner, FedBuff):  # who is there is asked, however few are left
            for name in ("min_train_nodes", "min_available_nodes"):
                setattr(self._inner, name, least)
        if settings.secure is not None:
            self._strategy = SecureSum(self._inner, settings.secure, deadline or STAGE_SECONDS)
        module = initial_module(recipe.model, recipe.seed)
        self.flat = Flat(module)
        if isinstance(self._inner, FedBuff):
            self._inner.weights = self.flat.weights
        self.weights = self.flat.vector(module.state_dict())
        self.number = 0
        self._places: dict[int, int] = {}

    @property
    def members(self) -> int:
        """Number of clients that may take part."""
        return max(self.settings.clients, len(self._places))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the global model by name."""
        return self.flat.state(self.weights)

    def _record(self) -> ArrayRecord:
        return ArrayRecord({WEIGHTS: private.Array(self.weights.numpy())})

    def _gather(self) -> None:
        """Waits for the clients that the first round begins with."""
        least, self._at_first = self._at_first, 0
        self._grid.wait_for(least, lambda there: self.say(f"{there} of {least} clients are there"))

    def _place(self, node: int) -> int:
        """Returns which client a node is."""
        for known in self._link.members.nodes:  # in the order of their keys, or as they have come
            self._places.setdefault(known, len(self._places))
        return self._places[node]

    def round(self) -> Result:
        """Has the clients of the next round train, and updates the global model. Raises Interrupted where it is given
        up, and the model is that of the round before."""
        self._gather()
        began, number = time.perf_counter(), self.number + 1
        updated: ArrayRecord | None = None
        means: MetricRecord | None = None
        if isinstance(self._strategy, FedBuff):
            updated = self._strategy.update(
                self._grid, number, self._record(), ConfigRecord(), self._deadline or float("inf")
            )
            plan, good = self._buffered(number, self._strategy), self._strategy.replies
            loss = mean_loss(good)
        else:
            with private.drawn_by(derive_key("flower", self.recipe.seed, number)):
                messages = list(self._strategy.configure_train(number, self._record(), self._config(), self._grid))
            replies = self._grid.send_and_receive(messages, timeout=self._deadline)
            plan, good = self._plan(number, len(messages), replies), [each for each in replies if not each.has_error()]
            loss = mean_loss(good)
            if len(good) >= self.settings.least:
                updated, means = self._strategy.aggregate_train(number, good)
            if isinstance(self._strategy, SecureSum):
                plan, loss = self._opened(plan, len(messages), self._strategy, means)
        broken = len(plan.tasks) - len(good)
        if updated is not None:
            seen = self._strategy.opened if isinstance(self._strategy, SecureSum) else good
            new = with_mean_of_buffers(to_vector(updated, self.weights), self._inner, seen, self.flat.weights)
            if not bool(torch.isfinite(new).all()):
                raise TrainingError(
                    f"round {number}: the global model is not finite after the update. A lower train.lr, or a lower lr "
                    "of federated.strategy, is the remedy"
                )
            self.weights = new
        self.number = number
        samples = sum(task.steps for task in plan.tasks) * self.recipe.batch
        taken = time.perf_counter() - began
        return Result(plan, loss, samples, broken, updated is not None, taken)

    def _config(self) -> ConfigRecord:
        partial = self._deadline is not None and self.settings.late == "partial"
        return ConfigRecord({SECONDS: 0.8 * float(self._deadline or 0.0)}) if partial else ConfigRecord()

    def _plan(self, number: int, asked: int, replies: Sequence[Message]) -> Round:
        """Returns what has come of a round."""
        failed = [each for each in replies if private.is_own_failure(each)]
        good = [each for each in replies if not each.has_error()]
        for each in failed:
            self.say(f"client {self._place(each.metadata.src_node_id)}: {each.error.reason}")
        tasks = tuple(self._task(each, number) for each in (*good, *failed))
        return Round(
            number,
            tasks,
            asked=asked,
            dropped=len(replies) - len(tasks),
            late=asked - len(replies),
            partial=sum(bool(_metrics(each).get(CUT)) for each in good),
            stale=(0,) * len(good),
            seconds=None,
        )

    def _opened(
        self, plan: Round, asked: int, strategy: SecureSum, means: MetricRecord | None
    ) -> tuple[Round, float | None]:
        """Returns what has come of a round of which only means are known, and the mean loss. `asked`: how many clients
        were to train; who was gone before that counts as dropped."""
        for each in strategy.failures:
            self.say(f"client {self._place(each.metadata.src_node_id)}: {each.error.reason}")
        if strategy.why:
            self.say(f"round {plan.number} is not opened: {strategy.why}")
        known = {} if means is None else dict(means)
        tasks = tuple(replace(each, steps=round(float(known.get("steps", 0)))) for each in plan.tasks)
        gone = plan.dropped + strategy.asked - asked
        return replace(plan, tasks=tasks, asked=strategy.asked, dropped=gone), known.get("loss")

    def _buffered(self, number: int, strategy: FedBuff) -> Round:
        stale = tuple(age for age, count in sorted(strategy.stale.items()) for _ in range(count))
        tasks = tuple(self._task(reply, number) for reply in strategy.replies)
        return Round(number, tasks, strategy.asked, strategy.lost, 0, 0, stale, None)

    def _task(self, reply: Message, number: int) -> Task:
        steps = 0 if reply.has_error() else int(_metrics(reply).get("steps", 0))
        return Task(self._place(reply.metadata.src_node_id), steps, number - 1, number)

    def evaluate(self) -> Measured | None:
        """Has all clients that are there measure the global model on what they hold out; None where none does, and
        under secure aggregation, since what one has measured would tell of it alone."""
        self._gather()
        if isinstance(self._strategy, SecureSum):
            return None
        content = RecordDict({"arrays": self._record(), "config": ConfigRecord({"server-round": self.number})})
        asked = [Message(content, node, "evaluate") for node in self._grid.get_node_ids()]
        replies = self._grid.send_and_receive(asked, timeout=self._deadline or MEASURE_SECONDS)
        found = {self._place(each.metadata.src_node_id): _metrics(each) for each in replies if not each.has_error()}
        counts = {place: int(each["num-examples"]) for place, each in found.items() if each["num-examples"]}
        if not (whole := sum(counts.values())):
            return None
        losses, accuracies = (np.full(self.members, np.nan) for _ in range(2))
        for place in counts:
            losses[place] = found[place]["loss"]
            accuracies[place] = found[place].get("accuracy", np.nan)

        def mean(values: np.ndarray) -> float:
            return float(sum(count * values[place] for place, count in counts.items()) / whole)

        shown = not np.isnan(accuracies).all()
        accuracy = mean(accuracies) if shown else None
        return Measured(mean(losses), whole, accuracy, losses, accuracies if shown else None)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns all that the next rounds depend on: tensors by name, and what JSON can hold."""
        memory = {
            f"strategy/{name}": torch.from_numpy(np.asarray(each))
            for name, each in private.memory_of(self._inner).items()
        }
        return {"weights": self.weights, **memory}, {"number": self.number}

    def load(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
        """Takes over what `state` has returned."""
        self.number, self.weights = int(rest["number"]), tensors["weights"].clone()
        if self.weights.shape != (self.flat.size,):
            raise UserError("the saved weights are of another model: give that again, or another run.dir")
        remember_in(self._inner, tensors, self.weights)

    def dismiss(self) -> None:
        """Tells the clients that all is over."""
        self._grid.dismiss()


def _metrics(reply: Message) -> dict[str, Any]:
    (found,) = reply.content.metric_records.values()
    return dict(found)

"""The clients of a simulation as a Flower `ClientApp`: many messages are one local training of many clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from shoal.device import keep_generators
from shoal.errors import UserError
from shoal.federated.flower import private
from shoal.federated.flower.grid import FIRST, Asked
from shoal.federated.local import LocalTraining
from shoal.federated.schedule import Task, in_groups

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip

WEIGHTS = "weights"
"""The name of the one array of a model: its vector (see Flat)."""


def to_record(weights: Tensor) -> ArrayRecord:
    """Returns the vector of a model as Flower has arrays."""
    return ArrayRecord({WEIGHTS: private.Kept(weights.detach().cpu().numpy())})


def to_vector(record: ArrayRecord, like: Tensor) -> Tensor:
    """Returns the vector in a record, in the dtype and on the device of `like`. Raises UserError for other arrays."""
    if list(record) != [WEIGHTS]:
        raise UserError(
            f"the arrays {', '.join(map(repr, record)) or 'none'}: a model is one array, {WEIGHTS!r}, as `to_record` "
            "of shoal.federated.flower.clients makes it"
        )
    return torch.from_numpy(np.ascontiguousarray(record[WEIGHTS].numpy())).to(like)


class SimulatedClients:
    """Answers messages of training: `proximal-mu` and `server-round` are read from their config.

    make: returns the local training under a mu, which is part of the step that is traced.
    """

    def __init__(self, make: Callable[[float], LocalTraining]) -> None:
        self._make, self._made = make, dict[float, LocalTraining]()

    def local(self, mu: float = 0.0) -> LocalTraining:
        """Returns the local training with this mu."""
        if mu not in self._made:
            self._made[mu] = self._make(mu)
        return self._made[mu]

    def app(self) -> ClientApp:
        """Returns the client app that answers one message."""
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            local = self.local(float(message.content["config"].get("proximal-mu", 0.0)))
            held = local.clients.train.counts[int(context.node_config["partition-id"])]
            return self.many([(message, context, max(1, -(-int(held) // local.recipe.batch)))])[0]

        return app

    def many(self, asked: Sequence[Asked]) -> list[Message]:
        """Trains the clients of several messages; returns their replies in the same order."""
        replies: dict[int, Message] = {}
        place = {id(message): index for index, (message, _, _) in enumerate(asked)}
        for _, same in groupby(asked, key=lambda each: id(each[0].content["arrays"])):
            members = list(same)
            config = members[0][0].content["config"]
            local = self.local(float(config.get("proximal-mu", 0.0)))
            number = int(config.get("server-round", 1))
            starts = to_vector(members[0][0].content["arrays"], local.start())
            messages = {context.node_id - FIRST: message for message, context, _ in members}
            tasks = [Task(context.node_id - FIRST, steps, 0, number) for _, context, steps in members]
            with keep_generators({local.device}):
                for group in in_groups(tasks, local.size):
                    for task, reply in zip(group, self._train(local, group, starts, messages, number), strict=True):
                        replies[place[id(messages[task.client])]] = reply
        return [replies[index] for index in range(len(asked))]

    def _train(
        self, local: LocalTraining, group: list[Task], starts: Tensor, messages: dict[int, Message], number: int
    ) -> list[Message]:
        found = local.train(group, starts, local.recipe.rate(number - 1))
        ended = (starts - found.moved).cpu().numpy()
        fine = np.isfinite(ended).all(axis=1)
        losses = (found.losses / found.counts).tolist()
        counts = local.clients.train.counts
        answers = []
        for index, task in enumerate(group):
            message = messages[task.client]
            if not fine[index]:
                answers.append(private.error_reply(message, private.FAILED, "its weights are not finite"))
                continue
            metrics = MetricRecord({"num-examples": int(counts[task.client]), "loss": losses[index]})
            content = RecordDict({"arrays": ArrayRecord({WEIGHTS: private.Kept(ended[index])}), "metrics": metrics})
            answers.append(Message(content, reply_to=message))
        return answers

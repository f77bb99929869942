"""A grid in this process: Flower's strategies send their messages to it as to a SuperLink, and nothing is serialised
for a network, queued in a database or handed to another process.

Messages that come together are answered together, so that a client app may train many clients at once. Time is
simulated as in `shoal.federated.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

import numpy as np

from shoal.federated.flower import private
from shoal.federated.schedule import Round, Rounds

from flwr.app import Context, Message, RecordDict  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip
from flwr.serverapp import Grid  # isort: skip
from flwr.supercore.run import Run  # isort: skip

Asked = tuple[Message, Context, int]
"""A message, the context of its client, and the local steps for which there is time."""
FIRST = 2
"""The id of the first client's node; the server is 1."""


BESIDE = "beside"
"""The group of messages that go to a client's training app, and are not its training."""


class LocalGrid(Grid):
    """Clients of `app`: client k is node k + 2, whose `node_config` has `partition-id` = k.

    rounds: who goes away, is late or cut short; without a deadline, drop-outs and speeds that is nobody.
    many: answers several messages at once; by default `app`, one after the other. What it raises for one message is
        that client's error, as on a SuperNode.
    past: what came of each round of training so far. clock: simulated time.
    """

    def __init__(
        self, app: ClientApp, rounds: Rounds, many: Callable[[Sequence[Asked]], list[Message]] | None = None
    ) -> None:
        self._run, self._app, self._rounds = private.begin_run(), app, rounds
        self._many = many or self._one_by_one
        clients = len(rounds.crowd.steps)
        self._contexts = {FIRST + k: private.node_context(FIRST + k, {"partition-id": k}) for k in range(clients)}
        self._numbers, self._waiting = count(1), dict[str, Message]()
        self.clock, self._ends = 0.0, dict[str, float]()
        self.past: list[Round] = []
        self._before = 0

    def begin_after(self, rounds: int) -> None:
        """Goes on after so many rounds of another process."""
        self._before = rounds - len(self.past)

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        pushed = []
        for message in messages:
            identity = private.number_message(message, next(self._numbers))
            self._waiting[identity] = message
            client = self._client(message)
            crowd = self._rounds.crowd
            self._ends[identity] = self.clock + float(crowd.steps[client] / crowd.speeds[client])
            pushed.append(identity)
        return pushed

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Returns the reply that comes first in simulated time, of those asked for; nothing where there are none."""
        asked = [identity for identity in message_ids if identity in self._waiting]
        if not asked:
            return []
        first = min(asked, key=lambda identity: (self._ends[identity], int(identity)))
        self.clock = max(self.clock, self._ends.pop(first))
        message = self._waiting.pop(first)
        client = np.array([self._client(message)])
        if self._rounds.crowd.chances("dropout", int(first), client)[0] < self._rounds.settings.dropout:
            return [private.error_reply(message, private.GONE, "went away")]
        return self._many([self._asked(message, int(self._rounds.crowd.steps[client[0]]))])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Sends messages and returns all replies, in the order of the messages; `timeout` is not of simulated time."""
        sent = list(messages)
        for message in sent:
            private.number_message(message, next(self._numbers))
        if not sent or not _trains(sent[0]):
            return self._many([self._asked(message, 0) for message in sent])
        number = self._before + len(self.past) + 1
        plan = self._rounds.answers(number, np.array(sorted(map(self._client, sent)), np.int64))
        self.clock += plan.seconds or 0.0
        self.past.append(plan)
        steps = {task.client: task.steps for task in plan.tasks}
        there = [message for message in sent if self._client(message) in steps]
        answers = iter(self._many([self._asked(message, steps[self._client(message)]) for message in there]))
        return [
            next(answers)
            if self._client(message) in steps
            else private.error_reply(message, private.GONE, "went away, or is late")
            for message in sent
        ]

    def _client(self, message: Message) -> int:
        return message.metadata.dst_node_id - FIRST

    def _asked(self, message: Message, steps: int) -> Asked:
        return message, self._contexts[message.metadata.dst_node_id], steps

    def _one_by_one(self, asked: Sequence[Asked]) -> list[Message]:
        return [self._answer(message, context) for message, context, _ in asked]

    def _answer(self, message: Message, context: Context) -> Message:
        try:
            return self._app(message, context)
        except Exception as error:  # a client's failure is the client's: a SuperNode answers so too
            return private.error_reply(message, private.FAILED, f"{type(error).__name__}: {error}")


def _trains(message: Message) -> bool:
    """Returns whether a message is of training, not of an evaluation, a query or what comes before a training."""
    return message.metadata.message_type.startswith("train") and message.metadata.group_id != BESIDE

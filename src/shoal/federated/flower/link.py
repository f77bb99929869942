"""A grid over a SuperLink of this process: real clients, who may come late, or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from shoal.federated.flower.private.superlink import SuperLink
from shoal.federated.simulation import Interrupted

from flwr.app import Message, RecordDict  # isort: skip
from flwr.serverapp import Grid  # isort: skip
from flwr.supercore.run import Run  # isort: skip

LOOK = 0.05
"""Seconds between two looks for replies."""
STILL = 0.5
"""Seconds between two looks from which on this process is thought to have stood still."""
OVER = "over"
"""The type of the message that ends a client."""
LEAVE_SECONDS = 5.0


class LinkGrid(Grid):
    """Sends messages to the clients of `link`. Raises Interrupted from any wait once `stopped` says so."""

    def __init__(self, link: SuperLink, stopped: Callable[[], bool]) -> None:
        self._link, self._stopped, self._looked = link, stopped, time.monotonic()

    def set_run(self, run: Run) -> None:
        self._link.run = run

    @property
    def run(self) -> Run:
        return self._link.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Returns the nodes that are there now. Strategies ask it again and again while they are too few."""
        self._look()
        return sorted(self._link.members.get_nodes(self.run.run_id))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._link.push(each) or "" for each in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self._look()
        return self._link.pull([each for each in message_ids if each])

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Sends messages and returns the replies that come in `timeout` seconds, None: however long it takes; a client
        that is gone answers with an error. What comes later is refused."""
        waiting = {identity for identity in self.push_messages(messages) if identity}
        until = None if timeout is None else time.monotonic() + timeout
        found: list[Message] = []
        try:
            while waiting and (until is None or time.monotonic() < until):
                new = self.pull_messages(waiting)
                found += new
                waiting -= {each.metadata.reply_to_message_id for each in new}
                if not new:
                    time.sleep(LOOK)
        finally:
            self._link.forget(waiting)
        return found

    def wait_for(self, number: int, tell: Callable[[int], None]) -> None:
        """Returns once so many clients are there; `tell` is told how many are, whenever that changes."""
        there = -1
        while (now := len(self.get_node_ids())) < number:
            if now != there:
                tell(there := now)
            time.sleep(LOOK)

    def dismiss(self) -> None:
        """Tells the clients that are there that all is over."""
        nodes = self._link.members.get_nodes(self.run.run_id)
        told = {self._link.push(Message(RecordDict({}), node, f"query.{OVER}")) for node in nodes}
        waiting: Collection[str] = {each for each in told if each}
        until = time.monotonic() + LEAVE_SECONDS
        while waiting and time.monotonic() < until:
            waiting = set(waiting) - {each.metadata.reply_to_message_id for each in self._link.pull(waiting)}
            time.sleep(LOOK)

    def _look(self) -> None:
        """Before each look at who is there: discounts the time since the last one, where that is long."""
        before, self._looked = self._looked, time.monotonic()
        if self._looked - before > STILL:
            self._link.members.forgive(self._looked - before)
        if self._stopped():
            raise Interrupted


def is_over(message: Message) -> bool:
    """Returns whether a message tells a client that all is over."""
    return message.metadata.message_type == f"query.{OVER}"

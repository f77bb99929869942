"""The weights of several servers of a job, as the first of them sees them: it decides upon pushes, and has the others,
its followers, make the same updates.

An update is made once its push is in the first server's journal. After a loss that is read again, and followers are
asked again, of which each does nothing twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.engine import Engine
from shoal.errors import CheckpointError, LaunchError, UserError
from shoal.plan import Option
from shoal.server.ledger import Gradient, Update
from shoal.server.link import Link
from shoal.server.messages import Apply, Begin, Done, Finish, Keep, Order, Sum
from shoal.server.served_table import ServedTable, gather
from shoal.server.sessions import Address, key_of_token
from shoal.server.sharing import KEPT
from shoal.server.weights import Weights

_MOST_DROPPED = 256
"""Dropped pushes that an order names; a record has room for about a thousand."""


class Followers:
    """The ways to the followers at `addresses`, over which `begin` goes first. `rank`: this server's among their
    clients; `timeout`: seconds to wait for one, also while it is started again."""

    def __init__(self, addresses: Sequence[str], rank: int, timeout: float, begin: Begin) -> None:
        key = key_of_token(None)  # by the line's name a first server that was started again takes its own place
        self._links = [Link(Address.read(each), key, begin.line, timeout, True) for each in addresses]
        self._threads = ThreadPoolExecutor(len(self._links), "shoal-followers")
        self.begin = begin
        for link in self._links:
            link.join(rank)
        self.each(begin)

    @property
    def parameters(self) -> list[int]:
        """How many numbers each has."""
        return [
            sum(math.prod(shape) for shape in link.shapes.values()) + sum(table.here for table in link.tables.values())
            for link in self._links
        ]

    def each(self, order: Order) -> list[Done]:
        """Has all of them do something, at the same time. Raises UserError or LaunchError where one does not."""
        return list(self._threads.map(lambda link: self._one(link, order), self._links))

    def close(self) -> None:
        """Tells them that nothing more will come."""
        self._threads.shutdown()
        for link in self._links:
            link.close(Finish())

    def _one(self, link: Link, order: Order) -> Done:
        done = link.order(order)
        if done.version < 0:  # it was started again before it had anything to go on from
            link.order(self.begin)
            done = link.order(order)
        return done


class Spread(Weights):
    """Weights of which the `followers` have the rest, and go on from where those begin.

    parts: the folder of this server's own checkpoints, and those of the followers, in which each writes its part of a
        checkpoint. kept: checkpoints that are kept of all together.
    """

    def __init__(
        self,
        engine: Engine,
        option: Option,
        clip: float | None,
        kept: int,
        about: Callable[[], Mapping[str, Any]],
        followers: Followers,
        parts: Sequence[Path],
        tables: Sequence[ServedTable] = (),
    ) -> None:
        super().__init__(engine, option, clip, KEPT, about, tables)
        self._followers, self._line, self._parts = followers, followers.begin.line, parts
        self._keep, self._since = kept, followers.begin.version
        self._dropped: list[list[Any]] = []

    @torch.no_grad()
    def update(self, update: Update) -> None:
        """Makes an update, on the followers first."""
        version, pushes = self.engine.step_index + 1, [_name(each) for each in update.gradients]
        self.mean(update)
        factor = self.clipped(self._squares_of_all(version, pushes)) if self.clips else torch.tensor(1.0)
        dropped, self._dropped = self._dropped[:_MOST_DROPPED], self._dropped[_MOST_DROPPED:]
        self._followers.each(Apply(version, pushes, dropped, update.weight, float(factor)))
        self.apply(update, factor)

    def dropped(self, push: Gradient) -> None:
        """Notes a push that no update will be made of, for the followers to forget."""
        self._dropped.append(_name(push))

    def check(self) -> None:
        """Raises CheckpointError where a follower is not at the same update, after the journals were read."""
        for number, done in enumerate(self._followers.each(self._followers.begin), 1):
            if done.version != self.engine.step_index:
                raise CheckpointError(
                    f"server {number} is at update {done.version}, the first one at {self.engine.step_index}: their "
                    f"journals are not of one run. Remove {self._parts[0].parent} to go on from the newest checkpoint"
                )

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint of all servers: each its part, which are then made one."""
        version, state = self.engine.step_index, extra["server"]
        decided = [[int(rank), each["incarnation"], each["sequence"]] for rank, each in state["members"].items()]
        try:
            self._followers.each(Keep(version, decided, self._since))
        except (UserError, LaunchError) as error:
            raise CheckpointError(f"the checkpoint of step {version} cannot be written: {error}") from error
        state = {**state, "line": self._line, "servers": len(self._parts)}
        self.save_part(self._parts[0], {**extra, "server": state})
        gather(self.tables, self._parts, version, directory, self._keep)
        self._since = version

    @property
    def shares(self) -> list[int]:
        return [*super().shares, *self._followers.parameters]

    def close(self) -> None:
        """Ends the followers, too."""
        self._followers.close()
        super().close()

    def _squares_of_all(self, version: int, pushes: list[list[Any]]) -> Tensor:
        row = self.squares()
        for done in self._followers.each(Sum(version, pushes)):
            for digit, value in done.row:
                row[int(digit)] += value
        return row


def _name(push: Gradient) -> list[Any]:
    return [push.rank, push.incarnation, push.sequence]

"""Who coordinates a job, and how a supervisor comes to do so. There are two ways:

succession.py       the coordinator and its standbys, in their order; they hold its journal
etcd_election.py    a key of an etcd cluster that ends with a lease; the cluster holds the journal
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Protocol

from shoal.elastic.events import Finish, Limits, StepDown, TookOver
from shoal.elastic.membership import Membership


@dataclass(frozen=True)
class Candidate:
    """A supervisor that may coordinate, and where it listens."""

    name: str
    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Candidate:
        """Reads "name host port". Raises ValueError for anything else."""
        name, host, port = text.split(" ")
        return cls(name, host, int(port))


def free_name(wished: str, *taken: Collection[str]) -> str:
    """Returns the name that a member wishes, with a number where it is taken."""
    names = chain([wished], (f"{wished}.{number}" for number in count(2)))
    return next(name for name in names if not any(name in each for each in taken))


End = Finish | StepDown | None
"""How coordinating has ended; None where the coordinator's own node left."""


class Tenure(Protocol):
    """The time for which a supervisor coordinates, where others than the members say so."""

    async def keep(self, lines: Sequence[str]) -> None:
        """Returns when the journal, which has come to `lines`, is where the next coordinator finds it."""

    async def hold(self, coordinating: Coroutine[Any, Any, End]) -> End:
        """Coordinates until that ends, or this tenure does: then the answer is StepDown."""


@dataclass(frozen=True)
class Office:
    """What a supervisor takes over: as the member `name`, the machine and the journal that lead to it.

    event: what happens first; None in a job that begins.
    tenure: None where the standbys hold the journal.
    """

    name: str
    machine: Membership
    lines: list[str]
    event: TookOver | None
    tenure: Tenure | None = None


class Election(Protocol):
    """Says who coordinates."""

    def __str__(self) -> str:
        """Says where a coordinator is looked for."""

    def begin(self, limits: Limits) -> None:
        """Takes in that a coordinator has admitted this member to a job of these limits."""

    def whom_to_ask(self, name: str) -> Awaitable[list[Candidate | None]]:
        """Returns who may coordinate, in the order in which they are asked; None stands for the asking `name`."""

    def pause(self) -> Awaitable[None]:
        """Waits between two looks for a coordinator, until another look may find more."""

    def take_over(self, own: Candidate, ended: Collection[str], quiet: float) -> Awaitable[Office | None]:
        """Has the supervisor `own` coordinate from now on; None where it must not.

        ended: candidates whose processes are proven to have ended.
        quiet: seconds since a coordinator was heard.
        """

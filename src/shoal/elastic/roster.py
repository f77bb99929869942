"""Which members there are, and what each can give to the next generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.elastic.backoff import Backoff
from shoal.elastic.events import Joined


@dataclass
class Roster:
    """The members of a job.

    backoff: who is put aside.
    members: those that are connected, by name.
    known: the incarnation of every member that there ever was, by name, in the order in which they first came.
    ready: how many processes of a member wait for a place.
    holding: the members of whose waiting processes one has the state of the run in memory. That may be an older state
        than others have: ranks go on from the newest.
    draining: the members that want to leave.
    came: when a member or a rank came last.
    """

    backoff: Backoff
    members: dict[str, Joined] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    holding: set[str] = field(default_factory=set)
    draining: set[str] = field(default_factory=set)
    came: float = 0.0

    def join(self, event: Joined) -> None:
        """Takes in a member that has come or come back."""
        self.members[event.name], self.known[event.name] = event, event.incarnation
        self.ready[event.name] = event.ranks
        self.hold(event.name, event.holds)

    def hold(self, name: str, holds: bool) -> None:
        if holds:
            self.holding.add(name)
        else:
            self.holding.discard(name)

    def wait(self, name: str, ranks: int, now: float) -> None:
        """Takes in how many processes of a member wait; more of them are newcomers."""
        if name in self.members:
            self.came = now if ranks > self.ready[name] else self.came
            self.ready[name] = ranks

    def remove(self, name: str) -> bool:
        """Forgets a member that is gone, but not its place; returns whether it was there."""
        self.draining.discard(name)
        self.holding.discard(name)
        self.ready.pop(name, None)
        return self.members.pop(name, None) is not None

    @property
    def all_leave(self) -> bool:
        """Whether nobody is left to go on: the run ends for now, as after a signal on one host."""
        return bool(self.members) and self.members.keys() <= self.draining

    def release(self, names: list[str]) -> None:
        """Lets members go; nobody wants to leave any more."""
        for name in names:
            self.members.pop(name, None)
        self.draining.clear()

    def newcomers(self, named: frozenset[str], room: bool, now: float) -> str:
        """Says who would give ranks beside those of the generation of the members `named`, "" if nobody would.
        `room`: whether there is room for other members."""
        new = [name for name in self.able(now) if room or name in named]
        said = [f"{name} has another rank" if name in named else f"{name} joins" for name in new[:4]]
        return ", ".join(said) + " ..." * (len(new) > 4)

    def able(self, now: float, least: int = 0) -> list[str]:
        """Returns the members that can give ranks, in the order of their places; where they are fewer than `least`,
        also those that are aside because they are slow."""
        here = [
            name
            for name in self.known
            if name in self.members and name not in self.draining and self.ready.get(name, 0)
        ]
        able = [name for name in here if self.backoff.left(name, now) <= 0]
        return able if len(able) >= least else [name for name in here if self.backoff.left(name, now, True) <= 0]

    def place(self, names: list[str]) -> dict[str, int]:
        """Takes the waiting processes of members for a generation; returns how many each gives."""
        ranks = {name: self.ready[name] for name in names}
        self.ready |= dict.fromkeys(names, 0)
        self.holding -= set(names)
        return ranks

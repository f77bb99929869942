"""Who coordinates when the coordinator is gone.

Every supervisor knows the candidates in their order: the coordinator and its standbys. A standby takes over at once if
the processes of all before it are proven to have ended. If they are only silent, it waits until whatever they may still
decide is over and more than half of the generation's members, which may live, have asked it who coordinates.

One that was stopped or cut off comes back with an old journal. It reads on in what coordinators have written into the
run directory meanwhile: it is the last in the order then, and knows whose agreement it needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from shoal.elastic.election import Candidate, Office
from shoal.elastic.events import Event, Limits, TookOver
from shoal.elastic.journal import Journal, continued, newest
from shoal.elastic.liveness import LEASE, SILENCE
from shoal.elastic.membership import Membership
from shoal.elastic.quorum import outnumbered

QUIET = LEASE + SILENCE + LEASE
"""Seconds without a coordinator after which one that others still hear has noticed that they are gone, too, and its
ranks have ended."""
_RETRY = 0.1
_RECENT = 3.0  # seconds for which somebody who asked who coordinates counts as being on this side


class Succession:
    """What a supervisor holds in case that it has to coordinate: an Election.

    limits: the job's. written: the lines of the journals that are in the run directory.
    """

    def __init__(self, limits: Limits, written: Callable[[], Sequence[list[str]]] = list) -> None:
        self._limits, self._written = limits, written
        self.candidates: list[Candidate] = []
        self._seen: dict[str, Candidate] = {}
        self.journal, self.machine = Journal(), Membership(limits)
        self._asked: dict[str, tuple[float, int]] = {}
        self.deposed = False
        """Whether this supervisor has coordinated and had to stop: it follows others from then on."""

    def begin(self, limits: Limits) -> None:
        """Forgets the journal: a coordinator has admitted this member, and sends its own if it wants a standby."""
        self._limits = limits
        self.journal, self.machine = Journal(), Membership(limits)
        self._asked.clear()

    def learn(self, candidates: list[Candidate]) -> None:
        """Takes in who coordinates, and who would next."""
        self.candidates = candidates
        self._seen |= {each.name: each for each in candidates}

    def __str__(self) -> str:
        return ", ".join(f"{each.host}:{each.port}" for each in self._all())

    async def whom_to_ask(self, name: str) -> list[Candidate | None]:
        """See Election: the candidates, then those of earlier times."""
        return [None if each.name == name else each for each in self._all()]

    async def pause(self) -> None:
        """See Election."""
        await asyncio.sleep(_RETRY)

    def take(self, line: str) -> int:
        """Adds a line of the coordinator's journal; returns how many there are. Raises Malformed."""
        event: Event = self.journal.take(line)
        self.machine.apply(event)
        return len(self.journal.lines)

    def asked(self, name: str, newest: int) -> None:
        """Notes that a member asks who coordinates; `newest`: the newest generation that it knows of."""
        self._asked[name] = time.monotonic(), newest

    async def take_over(self, own: Candidate, ended: Collection[str], quiet: float) -> Office | None:
        """See Election."""
        name, names = own.name, [each.name for each in self.candidates]
        if self.deposed or name not in names[1:] or not self.journal.lines:
            return None
        if self._read_on(own):
            return None  # who coordinates now may be among the others
        now = time.monotonic()
        here = {each: newest for each, (when, newest) in self._asked.items() if now - when < _RECENT} | {name: 0}
        proven = all(each in ended for each in names[: names.index(name)])
        if not proven:
            members = self.machine.named
            gone = {each: each in ended for each in members if each not in here}
            if quiet < QUIET or not members or outnumbered(members, gone, took_over=True):
                return None
        event = TookOver(time.time(), name, names[0], proven, max(here.values()))
        return Office(name, self.machine, self.journal.lines, event)

    def _read_on(self, own: Candidate) -> bool:
        """Takes what the newest journal has that begins as its own does. Returns whether that says that the supervisor
        `own` was counted as gone: all others come before it then, and it knows where they listen."""
        new = max((continued(self.journal.lines, lines) for lines in self._written()), key=newest, default=[])
        for line in new:
            self.take(line)
        members = self.machine.roster.members
        if not new or own.name in members:
            return False
        others = [*self.candidates, *(Candidate(each.name, each.host, each.port) for each in members.values())]
        self.learn([*{each.name: each for each in others if each.name != own.name}.values(), own])
        return True

    def _all(self) -> list[Candidate]:
        """Returns the candidates, then those of earlier times: who coordinated on the smaller side of a cut has lost
        all others from its own list."""
        now = {each.name for each in self.candidates}
        return [*self.candidates, *(each for name, each in self._seen.items() if name not in now)]

"""The members as the coordinator reaches them, some of which hold its journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from shoal.elastic.connection import Connection
from shoal.elastic.liveness import SILENCE
from shoal.elastic.messages import Entry, Join, Roster

STANDBYS = 2


@dataclass
class Peer:
    """A member's connection, on which it hears nothing before it is `admitted`. `entries`, `held`: the lines of the
    journal that a standby was sent, and those that it has."""

    connection: Connection
    join: Join
    heard: float = field(default_factory=time.monotonic)
    admitted: bool = False
    entries: int = 0
    held: int = 0


class Peers(dict[str, Peer]):
    """The members that are connected, by name.

    own: the member in whose process the coordinator runs. known: the names of all members, in their order.
    standbys: how many of them hold the journal.
    held: set when a standby has more of the journal, or is gone. roster: see messages.Roster.
    """

    def __init__(self, own: str, known: Mapping[str, str], standbys: int = STANDBYS) -> None:
        super().__init__()
        self._own, self._known, self._most = own, known, standbys
        self.held = asyncio.Event()
        self.roster: list[str] = []

    def send(self, name: str, message: Any) -> None:
        """Sends a message to a member, if it is there."""
        if (peer := self.get(name)) is not None and peer.admitted:
            peer.connection.send(message)

    async def replicate(self, lines: Sequence[str]) -> None:
        """Waits until the standbys hold the journal; one that is silent loses its place meanwhile."""
        for peer in self._standbys():
            for line in lines[peer.entries :]:
                peer.connection.send(Entry(line))
            peer.entries = len(lines)
        until = time.monotonic() + SILENCE
        while any(peer.held < peer.entries for peer in self._standbys()) and time.monotonic() < until:
            self.held.clear()
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await self.held.wait()
            except TimeoutError:
                break

    def _standbys(self) -> list[Peer]:
        """Returns the members that would coordinate next: the first ones that are connected."""
        peers = (self.get(name) for name in self._known if name != self._own)
        return list(islice((peer for peer in peers if peer is not None and peer.admitted), self._most))

    def tell_roster(self, names: Mapping[str, str]) -> None:
        """Tells everybody who would coordinate next, where that has changed. `names`: of members, by incarnation."""
        own = self.get(self._own)
        candidates = [] if own is None else [own, *self._standbys()]
        roster = [f"{names[each.join.incarnation]} {each.join.host} {each.join.port}" for each in candidates]
        if roster and roster != self.roster:
            self.roster = roster
            for name in self:
                self.send(name, Roster(roster))

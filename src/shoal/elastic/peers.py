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
from shoal.elastic.relay import Branch
from shoal.elastic.tunnel import Tunnel

STANDBYS = 2
_BATCH = 32_000  # characters of the journal in one message


@dataclass
class Peer:
    """A member's connection, on which it hears nothing before it is `admitted`. `branch`: the members below it; None
    for one that is itself below another. `entries`, `held`: the lines of the journal that a standby was sent, and
    those that it has."""

    connection: Connection | Tunnel
    join: Join
    branch: Branch | None = None
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

    def relay(self, fanout: int) -> Join | None:
        """Returns who takes another member, None for the coordinator itself: if as many as `fanout` are connected to
        it, the one of them with the fewest below."""
        above = [each for each in self.values() if each.branch is not None and each.join.name != self._own]
        ready = [each for each in above if each.admitted]
        if len(above) < fanout or not ready:
            return None
        return min(ready, key=lambda each: len(each.branch or ())).join

    def send_all(self, message: Any) -> None:
        """Sends a message to all: first to those below others, which may end because of it."""
        for below in (True, False):
            for name, peer in self.items():
                if (peer.branch is None) == below:
                    self.send(name, message)
            for peer in self.values():
                if peer.branch is not None:
                    peer.branch.flush()

    def send(self, name: str, message: Any) -> None:
        """Sends a message to a member, if it is there."""
        if (peer := self.get(name)) is not None and peer.admitted:
            peer.connection.send(message)

    async def replicate(self, lines: Sequence[str]) -> None:
        """Waits until the standbys hold the journal; one that is silent loses its place meanwhile."""
        for peer in self._standbys():
            for some in _batches(lines[peer.entries :]):
                peer.connection.send(Entry(some))
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
            self.send_all(Roster(roster))


def _batches(lines: Sequence[str]) -> list[list[str]]:
    """Returns lines as lists of at most _BATCH characters, or one line."""
    found: list[list[str]] = []
    size = _BATCH
    for line in lines:
        size += len(line)
        if size > _BATCH:
            found.append([])
            size = len(line)
        found[-1].append(line)
    return found

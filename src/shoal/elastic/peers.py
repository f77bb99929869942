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
from shoal.elastic.messages import Elsewhere, Entry, Join, Roster
from shoal.elastic.relay import Branch
from shoal.elastic.tunnel import Tunnel

STANDBYS = 2
_BATCH = 32_000  # characters of the journal in one message


@dataclass
class Peer:
    """A member's connection, on which it hears nothing before it is `admitted`. `branch`: the members below it; None
    for one that is itself below another. `sent`: members that were sent there a moment ago, and may not have come yet.
    `entries`, `held`: the lines of the journal that a standby was sent, and those that it has."""

    connection: Connection | Tunnel
    join: Join
    branch: Branch | None = None
    heard: float = field(kw_only=True)
    admitted: bool = False
    entries: int = 0
    held: int = 0
    sent: int = 0

    @property
    def below(self) -> int:
        """How many members are below it."""
        return len(self.branch or ())


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
        self._direct: dict[str, Peer] = {}
        self._moved: set[str] = set()
        self._hold: list[str] = []  # the standbys

    def put(self, name: str, peer: Peer) -> None:
        """Takes in a new connection of a member."""
        self[name] = peer
        self._direct.pop(name, None)
        if peer.branch is not None:
            self._direct[name] = peer

    @property
    def direct(self) -> dict[str, Peer]:
        """The members that are connected to the coordinator itself, in the order in which they came."""
        self._direct = {name: peer for name, peer in self._direct.items() if self.get(name) is peer}
        return self._direct

    def relay(self, fanout: int, incarnation: str) -> Join | None:
        """Returns who takes another member, of this incarnation; None for the coordinator itself. If as many as
        `fanout` are connected to it, it is the one of them with the fewest below."""
        above = self._relays()
        ready = [each for each in above[:fanout] if each.admitted and each.join.incarnation != incarnation]
        if len(above) < fanout or not ready:
            return None
        least = min(ready, key=lambda each: each.below + each.sent)
        least.sent += 1
        return least.join

    def even_out(self, fanout: int) -> None:
        """Has a member come again, for which there is a better place in the tree by now: one of more than `fanout` that
        are connected to the coordinator, else the last one below the fullest relay, where there is room above or a
        relay that has not half as many. None of them has members below or is a standby, and none is asked twice before
        `settle`."""
        above, own, standbys = self._relays(), self.get(self._own), self._standbys()
        chosen = above[fanout:]
        if above and not chosen:
            fullest = max(above, key=lambda each: each.below)
            least = 0 if len(above) < fanout else max(fanout, 2 * min(each.below for each in above))
            leaf = fullest.branch.last if fullest.branch is not None and fullest.below > least else None
            chosen = [each for each in self.values() if each.connection is leaf] if leaf is not None else []
        for peer in chosen:
            asked = peer.join.incarnation in self._moved or peer in standbys
            if own is not None and peer.admitted and not asked:
                self._moved.add(peer.join.incarnation)
                peer.connection.send(Elsewhere(own.join.host, own.join.port))
                return

    def stays(self, incarnation: str) -> None:
        """Takes in that a member could not come again now: it may be asked once more."""
        self._moved.discard(incarnation)

    def settle(self) -> None:
        """Takes in that a generation begins, in which each may be asked again."""
        self._moved.clear()

    def _relays(self) -> list[Peer]:
        """The members, but the own one, that are connected to the coordinator and may have others below."""
        return [peer for name, peer in self.direct.items() if name != self._own]

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
        """Returns the members that would coordinate next: those that would so far, then the first that are connected.
        Who comes back takes nobody's place: two that each think to be the next one could both take over."""

        def there(name: str) -> bool:
            peer = self.get(name)
            return peer is not None and peer.admitted and name != self._own

        kept = list(filter(there, self._hold))
        more = (name for name in self._known if name not in kept and there(name))
        self._hold = [*kept, *islice(more, self._most - len(kept))]
        return [self[name] for name in self._hold]

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

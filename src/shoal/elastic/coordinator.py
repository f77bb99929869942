"""The coordinator: feeds what members say into the membership and tells them what is decided.

    messages, silence, closed connections --> events --> journal (disk, then standbys) --> membership --> messages

Everything happens in one thread, in the order in which it is journalled. A member that says nothing for SILENCE seconds
is gone, unproven; one whose connection closes is gone and proven so if its port refuses connections.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from shoal.elastic import relay as relays
from shoal.elastic.connection import Connection
from shoal.elastic.election import free_name
from shoal.elastic.events import (
    Asked,
    Decision,
    Draining,
    Drop,
    Ended,
    Event,
    Finish,
    Form,
    Joined,
    Left,
    Ready,
    Release,
    Say,
    Slow,
    StepDown,
    Stop,
    Tick,
)
from shoal.elastic.journal import Journal
from shoal.elastic.liveness import BEAT, SILENCE, refuses
from shoal.elastic.membership import RUNNING, Membership
from shoal.elastic.messages import (
    DIRECT,
    Admitted,
    Ask,
    Beat,
    Drain,
    Elsewhere,
    End,
    GiveUp,
    Heard,
    Held,
    Join,
    Note,
    Over,
    Paces,
    Passed,
    Refused,
    Released,
    Report,
    Roster,
    Stalled,
    Start,
    Waiting,
)
from shoal.elastic.pace import Stragglers
from shoal.elastic.peers import STANDBYS, Peer, Peers
from shoal.elastic.records import Malformed
from shoal.elastic.relay import Branch
from shoal.elastic.site import Site
from shoal.elastic.standstill import Standstill
from shoal.elastic.tunnel import Tunnel
from shoal.elastic.waiting import tell_who_waits, why_it_waits

_LOOK, _LOOK_AT_PACES = 0.05, 1.0


class Coordinator:
    """Coordinates by `machine`, whose events are in `journal`."""

    def __init__(self, machine: Membership, journal: Journal, site: Site) -> None:
        self.machine, self.journal, self._site = machine, journal, site
        self._peers = Peers(site.name, machine.roster.known, STANDBYS if site.tenure is None else 0)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._names = {each: name for name, each in machine.roster.known.items()} | {site.incarnation: site.name}
        self._stragglers, self._standstill, self._next_look = Stragglers(), Standstill(), 0.0
        self._kept = set[tuple[str, int]]()
        self.released = False
        """Whether the member in whose process this runs has drained and leaves."""

    async def run(self) -> Finish | StepDown | None:
        """Coordinates until the job is over, this side must not go on, or the own member leaves (None)."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                events = [await self._events.get()]
                while not self._events.empty():
                    events.append(self._events.get_nowait())
                self.journal.append(events)
                decisions = [each for event in events for each in self.machine.apply(event)]
                for event in events:
                    if isinstance(event, Joined):
                        self._admit(event.name)
                await self._keep()
                ends = [self._carry_out(each) for each in decisions if not (self.released and isinstance(each, Form))]
                ends = [end for end in ends if end is not None]
                if ends or self.released:
                    return ends[0] if ends else None
                self._peers.tell_roster(self._names)
        finally:
            watching.cancel()
            await asyncio.gather(*(peer.connection.close() for peer in list(self._peers.values())))
            self._peers.clear()

    def tell(self, event: Event) -> None:
        """Takes in an event that this process knows of."""
        self._events.put_nowait(event)

    async def welcome(self, connection: Connection | Tunnel, join: Join) -> None:
        """Hears a member until its connection ends; sends it to a relay where there are many."""
        stays = join.way == DIRECT or join.incarnation == self._site.incarnation or isinstance(connection, Tunnel)
        if not stays and (relay := self._peers.relay(relays.FANOUT, join.incarnation)) is not None:
            connection.send(Elsewhere(relay.host, relay.port, below=True))
            await connection.close()
            return
        name = self._name_for(join)
        if join.connected and self._may_have_old_news(name, join):
            self._peers.stays(join.incarnation)
            connection.send(Elsewhere("", 0))
            await connection.close()
            return
        place = join.ranks, join.host, join.port, join.running, join.holds
        try:
            event = Joined(time.time(), name, join.incarnation, *place)
        except ValueError as error:
            connection.send(Refused(str(error)))
            await connection.close()
            return
        if (before := self._peers.get(name)) is not None:
            before.connection.abort()
        peer = Peer(connection, join, heard=time.monotonic())
        if isinstance(connection, Connection):
            peer.branch = Branch(connection, self._site.key, self.welcome, self._site.say)
        self._peers.put(name, peer)
        self.tell(event)
        try:
            while True:
                self._hear(name, peer, await connection.receive())
        except Malformed as error:
            self._site.say(f"{name} was hung up on: it sent {error}")
        except OSError:
            pass  # what that means is found out below
        connection.abort()
        if peer.branch is not None:
            peer.branch.end(peer.heard)
        elif isinstance(connection, Tunnel):
            peer.heard = connection.heard
        peer.admitted = False
        self._peers.held.set()
        await self._lost(name, peer)

    def _may_have_old_news(self, name: str, join: Join) -> bool:
        """Whether a member that comes by another way may not have heard yet what it was told by the old one, or this
        side not what it told. Its ranks, which go on, would count as ended."""
        quiet = self.machine.phase == RUNNING and self._events.empty()
        return name in self._peers and not (quiet and join.running == self._running(name))

    def _running(self, name: str) -> int:
        """The generation in which a member has ranks, 0 for none."""
        generation = self.machine.generation
        return generation.number if generation is not None and name in self.machine.pending else 0

    def _hear(self, name: str, peer: Peer, message: Any) -> None:
        peer.heard = time.monotonic()
        if isinstance(message, Beat):
            peer.connection.send(Heard(message.number))
        elif isinstance(message, Passed) and peer.branch is not None:
            peer.branch.take(message.pieces)
        elif isinstance(message, Held):
            peer.held = message.lines
            self._peers.held.set()
        elif isinstance(message, Report | Waiting):
            kind = Ended if isinstance(message, Report) else Ready
            try:
                self.tell(kind(time.time(), name, **vars(message)))
            except ValueError as error:
                raise Malformed(str(error)) from None
        elif isinstance(message, Paces):
            try:
                self._stragglers.take(name, message, peer.heard)
            except ValueError as error:
                raise Malformed(str(error)) from None
        elif isinstance(message, Stalled):
            self._standstill.take(name, message.generation, peer.heard)
        elif isinstance(message, Drain):
            self.tell(Draining(time.time(), name, message.number))
        elif isinstance(message, Ask):
            self.tell(Asked(time.time(), message.number))
        else:
            raise Malformed(f"{type(message).__name__} after Join")

    async def _lost(self, name: str, peer: Peer) -> None:
        """Finds out whether a member whose connection has ended lives; if so it has a moment to come back."""
        if self._peers.get(name) is not peer:
            return
        proven = await refuses(peer.join.host, peer.join.port)
        if not proven:
            await asyncio.sleep(max(0.0, peer.heard + SILENCE - time.monotonic()))
        if self._peers.get(name) is peer:
            del self._peers[name]
            self.tell(Left(time.time(), name, proven, "its process has ended" if proven else "its connection broke"))

    async def _watch(self) -> None:
        """Notices silence and the passing of time. Time in which this process itself stood still counts for nobody."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK)
            now = time.monotonic()
            stood, before = now - before - _LOOK, now
            for name, peer in self._peers.direct.items():
                peer.heard, peer.sent = peer.heard + (stood if stood > BEAT else 0.0), 0
                if now - peer.heard > SILENCE:
                    del self._peers[name]
                    peer.connection.abort()
                    self.tell(Left(time.time(), name, False, f"it was silent for {now - peer.heard:.1f} s"))
            if self.machine.due(time.time()):
                self.tell(Tick(time.time()))
            if self.machine.phase == RUNNING:
                self._peers.even_out(relays.FANOUT)
            if now >= self._next_look:
                self._next_look = now + _LOOK_AT_PACES
                self._look_at_ranks(now)

    def _look_at_ranks(self, now: float) -> None:
        """Has all ranks leave where none comes further, and a slow member put aside, unless too few nodes are left."""
        machine = self.machine
        number = machine.generation.number if machine.generation is not None else 0
        if machine.phase == RUNNING and self._standstill.look(number, machine.pending, now):
            self._site.say(f"no rank of generation {number} comes further: all leave it")
            self._peers.send_all(GiveUp(number))
        if (found := self._stragglers.look(number, machine.named, now)) is None:
            return
        self._stragglers.forget(found.name)
        if machine.can_spare(found.name):
            self.tell(Slow(time.time(), found.name, number, found.text))
        elif (found.name, number) not in self._kept:
            self._kept.add((found.name, number))
            self._site.say(f"{found.text}, and stays: less than {machine.limits.minimum} node(s) would be left")

    def _name_for(self, join: Join) -> str:
        """Returns the name that this process has here, else the wished one, with a number where that is taken."""
        if join.incarnation not in self._names:
            self._names[join.incarnation] = free_name(join.name, self._peers, self.machine.awaited, (self._site.name,))
        return self._names[join.incarnation]

    def _admit(self, name: str) -> None:
        if (peer := self._peers.get(name)) is None:
            return
        peer.admitted = True
        peer.connection.send(Admitted(**{**vars(self._site.job), "name": name, "generation": self._running(name)}))
        if why := why_it_waits(self.machine, name):
            peer.connection.send(Note(why))
        peer.connection.send(Roster(self._peers.roster))

    def _carry_out(self, decision: Decision) -> Finish | StepDown | None:
        """Tells a decision; returns it if it is the last."""
        if isinstance(decision, Form):
            self._form(decision)
        elif isinstance(decision, Stop):
            for name in self.machine.named:
                self._peers.send(name, End(decision.generation, decision.how, decision.why))
        elif isinstance(decision, Drop):
            if (peer := self._peers.pop(decision.name, None)) is not None:
                peer.connection.abort()
        elif isinstance(decision, Release):
            self._peers.send(decision.name, Released())
            self.released = self.released or decision.name == self._site.name
        elif isinstance(decision, Say):
            self._site.say(decision.text)
        elif isinstance(decision, Finish):
            self._peers.send_all(Over(decision.code, decision.why))
            return decision
        else:
            return decision
        return None

    def _form(self, decision: Form) -> None:
        generation, events = decision.generation, list(decision.events)
        (host, port), args = self._site.open_store(generation), self._site.arrange(generation.size)
        number, size, nodes = generation.number, generation.size, len(generation.places)
        self._site.say(f"generation {number}: {size} rank(s) on {nodes} node(s) ({generation.why})")
        about = generation.why, generation.step, events, generation.live, args, generation.failed
        self._peers.settle()
        tell_who_waits(self.machine, self._peers)
        for place in generation.places:
            self._peers.send(place.name, Start(number, place.first, place.ranks, size, host, port, nodes, *about))

    async def _keep(self) -> None:
        """Waits until the journal is where the next coordinator finds it."""
        if self._site.tenure is not None:
            await self._site.tenure.keep(self.journal.lines)
        await self._peers.replicate(self.journal.lines)

"""A tree of relays: the coordinator has a connection to some members, each of these to some others, and so on.

    coordinator -- relay -- relay -- member

A relay answers the beats of the members below it, notices when they are silent or gone, and passes on what they and
the coordinator tell each other (see tunnel.py): what comes within GATHER seconds goes up as one message, what comes
down in one message goes on as one to each. Its own beats tell it that the coordinator lives; it says how long ago.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shoal.elastic.connection import SECONDS, Connection
from shoal.elastic.liveness import SILENCE
from shoal.elastic.messages import Beat, Elsewhere, Heard, Join, Passed, Via
from shoal.elastic.records import Malformed
from shoal.elastic.tunnel import CLOSE, FRAME, OPEN, PART, Outbox, Passage, Piece, Tunnel

FANOUT = 64
"""Members that have a connection to the coordinator, or to one relay."""
GATHER = 0.005
MOST_TUNNELS = 1 << 16

Say = Callable[[str], None]


@dataclass
class Child:
    """A member below this one. `tunnels`: the numbers above, by those on its own hop; `sent`: members that were sent
    there a moment ago, and may not have come yet."""

    connection: Connection
    join: Join
    out: Outbox
    heard: float
    tunnels: dict[int, int] = field(default_factory=dict)
    sent: int = 0


class Relay:
    """The members below this one. age: seconds since the coordinator was known to live. say: writes to the log."""

    def __init__(self, age: Callable[[], float], say: Say) -> None:
        self._age, self._say = age, say
        self._up: Outbox | None = None
        self._children: list[Child] = []
        self._below: dict[int, tuple[Child, int]] = {}  # by the number above
        self._last = 0

    @property
    def busy(self) -> bool:
        """Whether there are members below."""
        return bool(self._children)

    def attach(self, connection: Connection | Passage) -> None:
        """Passes on by this way to the coordinator from now on."""
        self._up = Outbox(connection.send, GATHER)

    def detach(self) -> None:
        """Hangs up on the members below: the way up is gone, and each finds one for itself."""
        self._up = None
        for child in self._children:
            child.connection.abort()

    async def serve(self, connection: Connection, join: Join) -> bool:
        """Takes a member that was sent here, or sends it further down; returns whether it could."""
        if self._up is None:
            return False
        if len(self._children) >= FANOUT:
            least = min(self._children, key=lambda each: len(each.tunnels) + each.sent)
            least.sent += 1
            connection.send(Elsewhere(least.join.host, least.join.port, below=True))
            await connection.close()
            return True
        child = Child(connection, join, Outbox(connection.send), time.monotonic())
        self._children.append(child)
        connection.send(Via())
        try:
            while True:
                self._hear(child, await connection.receive())
        except Malformed as error:
            self._say(f"{join.name} was hung up on: it sent {error}")
        except OSError:
            pass  # it is gone, which goes up
        finally:
            self._forget(child)
        return True

    def _hear(self, child: Child, message: object) -> None:
        child.heard = time.monotonic()
        if isinstance(message, Beat):
            child.connection.send(Heard(message.number, int(1e3 * self._age()) + 1))
        elif isinstance(message, Passed):
            for piece in map(Piece.read, message.pieces):
                self._pass_up(child, piece)
        else:
            raise Malformed(f"{type(message).__name__} to a relay")

    def _pass_up(self, child: Child, piece: Piece) -> None:
        if self._up is None:
            return
        if piece.kind == OPEN and piece.number not in child.tunnels:
            if len(child.tunnels) >= MOST_TUNNELS:
                raise Malformed(f"more than {MOST_TUNNELS:,} tunnels")
            self._last += 1
            child.tunnels[piece.number] = self._last
            self._below[self._last] = child, piece.number
        number = child.tunnels.get(piece.number)
        if number is not None:
            self._up.put(Piece(number, piece.kind, piece.rest))
            if piece.kind == CLOSE:
                del self._below[child.tunnels.pop(piece.number)]

    def down(self, pieces: list[str]) -> None:
        """Passes on what comes from above. Raises Malformed."""
        outs: dict[int, Outbox] = {}
        for piece in map(Piece.read, pieces):
            if (place := self._below.get(piece.number)) is None:
                continue  # it is gone meanwhile
            child, number = place
            outs[id(child)] = child.out
            child.out.put(Piece(number, piece.kind, piece.rest))
            if piece.kind == CLOSE:
                del child.tunnels[number], self._below[piece.number]
        for out in outs.values():
            out.flush()

    def watch(self, now: float, stood: float) -> None:
        """Hangs up on members that are silent. `stood`: seconds for which this process itself stood still."""
        for child in self._children:
            child.heard, child.sent = child.heard + stood, 0
            if now - child.heard > SILENCE:
                child.connection.abort()

    def _forget(self, child: Child) -> None:
        child.connection.abort()
        self._children.remove(child)
        ago = time.monotonic() - child.heard
        for number in child.tunnels.values():
            del self._below[number]
            if self._up is not None:
                self._up.put(Piece(number, CLOSE, f"{ago:.3f}"))


class Branch:
    """The coordinator's ends of the tunnels that come by one connection.

    welcome: hears the member at the other end of a tunnel, until it ends.
    """

    def __init__(
        self, connection: Connection, key: bytes, welcome: Callable[[Tunnel, Join], Awaitable[None]], say: Say
    ) -> None:
        self._out, self._key, self._welcome, self._say = Outbox(connection.send), key, welcome, say
        self._tunnels: dict[int, Tunnel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tunnels)

    def take(self, pieces: list[str]) -> None:
        """Takes in pieces. Raises Malformed."""
        for piece in map(Piece.read, pieces):
            tunnel = self._tunnels.get(piece.number)
            if piece.kind == OPEN:
                if tunnel is not None or len(self._tunnels) >= MOST_TUNNELS:
                    raise Malformed(f"tunnel {piece.number} again, or too many")
                self._open(piece)
            elif tunnel is not None and piece.kind in (PART, FRAME):
                tunnel.take(piece.kind, piece.rest)
            elif tunnel is not None:
                self._tunnels.pop(piece.number).end(piece.ago)

    @property
    def last(self) -> Tunnel | None:
        """The newest tunnel: that of a member with none below, since whoever is below another comes after it."""
        return next(reversed(self._tunnels.values()), None)

    def flush(self) -> None:
        """Sends at once what waits to be sent together."""
        self._out.flush()

    def end(self, heard: float) -> None:
        """Ends all tunnels: the connection has ended, on which something was `heard` last then."""
        for tunnel in self._tunnels.values():
            tunnel.end(time.monotonic() - heard)
        self._tunnels.clear()

    def _open(self, piece: Piece) -> None:
        number, own = piece.number, secrets.token_hex(16)

        def put(kind: str, rest: str) -> None:
            self._out.put(Piece(number, kind, rest))
            if kind == CLOSE:
                self._tunnels.pop(number, None)

        tunnel = self._tunnels[number] = Tunnel(put, self._key, own, piece.rest, calls=False)
        put(OPEN, own)
        task = asyncio.create_task(self._hear(tunnel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear(self, tunnel: Tunnel) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                join = await tunnel.receive()
            if not isinstance(join, Join):
                raise Malformed(f"{type(join).__name__} before Join")
            await self._welcome(tunnel, join)
        except Malformed as error:
            self._say(f"a member below a relay was hung up on: it sent {error}")
        except (OSError, TimeoutError):
            return  # it has gone
        finally:
            tunnel.abort()

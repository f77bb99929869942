"""Tunnels: what a member and the coordinator tell each other by way of other supervisors (see relay.py), which read
nothing of it. Frames are sealed from end to end, as those of a connection are.

A tunnel travels in pieces, of which one message of a hop (Passed) takes many. A piece is a line of text:

    NUMBER open RANDOM      by the member; the coordinator answers with its own. The tunnel's key follows from both
    NUMBER part BASE64      the beginning of a sealed message that is too long for one piece
    NUMBER frame BASE64     a sealed message, or its end
    NUMBER close SECONDS    the member was heard last so many seconds ago

The number counts tunnels on one hop: who passes a piece on puts its own there. The member's own tunnel is number 0.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shoal.comm.sealed import HEAD, Seal
from shoal.comm.signed import derived
from shoal.elastic.connection import SECONDS, Connection
from shoal.elastic.messages import FROM_MEMBER, TO_MEMBER, Beat, Heard, Passed
from shoal.elastic.records import Malformed, decode, encode

OPEN, PART, FRAME, CLOSE = "open", "part", "frame", "close"
MOST_PIECE, MOST_BATCH = 40_000, 48_000  # characters; a message of a hop has at most 64 KiB
MOST_PARTS = 4


@dataclass(frozen=True)
class Piece:
    """A piece of the tunnel `number`."""

    number: int
    kind: str
    rest: str

    def __str__(self) -> str:
        return f"{self.number} {self.kind} {self.rest}"

    @classmethod
    def read(cls, text: str) -> Piece:
        """Reads a piece. Raises Malformed."""
        number, _, more = text.partition(" ")
        kind, _, rest = more.partition(" ")
        if not (number.isascii() and number.isdecimal() and len(number) < 10) or kind not in (OPEN, PART, FRAME, CLOSE):
            raise Malformed(f"{text!r:.100} is no piece of a tunnel")
        return cls(int(number), kind, rest)

    @property
    def ago(self) -> float:
        """How many seconds ago the member of a tunnel that closes was heard. Raises Malformed."""
        try:
            return max(0.0, float(self.rest))
        except ValueError:
            raise Malformed(f"a tunnel that closes after {self.rest!r:.20} s") from None


class Outbox:
    """Pieces for one hop, which are sent together: those of one turn of the loop, or of `wait` seconds."""

    def __init__(self, send: Callable[[Any], None], wait: float = 0.0) -> None:
        self._send, self._wait = send, wait
        self._pieces: list[str] = []
        self._size = 0
        self._due: asyncio.Handle | None = None

    def put(self, piece: Piece) -> None:
        text = str(piece)
        if self._size + len(text) > MOST_BATCH:
            self.flush()
        self._pieces.append(text)
        self._size += len(text) + 4
        if self._due is None:
            loop = asyncio.get_running_loop()
            self._due = loop.call_later(self._wait, self.flush) if self._wait else loop.call_soon(self.flush)

    def flush(self) -> None:
        """Sends what there is at once."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        pieces, self._pieces, self._size = self._pieces, [], 0
        if pieces:
            self._send(Passed(pieces))


class Tunnel:
    """One end of a tunnel, to be used as a Connection.

    put: sends a piece of it, of this kind and with this content. own, other: the random numbers of both ends.
    """

    def __init__(self, put: Callable[[str, str], None], key: bytes, own: str, other: str, *, calls: bool) -> None:
        self._put = put
        member, coordinator = (own, other) if calls else (other, own)
        whole = derived(key, "tunnel", member, coordinator)
        ends = ("member", "coordinator") if calls else ("coordinator", "member")
        self._out, self._in = (Seal(whole, end) for end in ends)
        known = TO_MEMBER if calls else FROM_MEMBER
        self._known = {name: each for name, each in known.items() if each not in (Beat, Heard, Passed)}
        self._came: asyncio.Queue[Any] = asyncio.Queue()
        self._parts: list[str] = []
        self._open = True
        self.heard = time.monotonic()
        """When the member was heard last, for the coordinator."""

    @property
    def waiting(self) -> int:
        """How many messages have come."""
        return self._came.qsize()

    def send(self, message: Any) -> None:
        """Sends a message without waiting."""
        if self._open:
            text = base64.b64encode(self._out.put(encode(message))).decode()
            while len(text) > MOST_PIECE:
                self._put(PART, text[:MOST_PIECE])
                text = text[MOST_PIECE:]
            self._put(FRAME, text)

    def take(self, kind: str, text: str) -> None:
        """Takes in a frame or a part of one; what is none is found out by who receives."""
        self._parts.append(text)
        if kind == PART and len(self._parts) < MOST_PARTS:
            return
        text = "".join(self._parts)
        self._parts.clear()
        try:
            frame = base64.b64decode(text, validate=True)
            size, number, proof = HEAD.unpack_from(frame)
            body = frame[HEAD.size :]
            if size != len(body) or not self._in.holds(number, proof, body):
                raise Malformed("a frame that is not signed, or comes again")
            self._came.put_nowait(decode(body, self._known))
        except (binascii.Error, Malformed, ValueError) as error:
            self._came.put_nowait(error if isinstance(error, Malformed) else Malformed(f"no frame: {error}"))
        except Exception as error:
            self._came.put_nowait(Malformed(f"no frame: {error}"))

    async def receive(self) -> Any:
        """Returns the next message. Raises Malformed for what is none, OSError where the tunnel has ended."""
        message = await self._came.get()
        if isinstance(message, Exception):
            raise message
        return message

    def end(self, ago: float = 0.0) -> None:
        """Takes in that the other end is gone, or the way there; the member was heard so many seconds `ago`."""
        if self._open:
            self._open = False
            self.heard = time.monotonic() - ago
            self._came.put_nowait(ConnectionResetError("the way there has ended"))

    def abort(self) -> None:
        """Ends it."""
        if self._open:
            self._put(CLOSE, "0")
            self.end()

    async def close(self, seconds: float = SECONDS) -> None:
        """Ends it; what was sent is on its way."""
        self.abort()


class Passage:
    """A member's end of its way to the coordinator, which begins with the connection `hop` to a relay."""

    def __init__(self, hop: Connection, tunnel: Tunnel) -> None:
        self._hop, self._tunnel = hop, tunnel

    @classmethod
    async def open(cls, hop: Connection, key: bytes) -> Passage:
        """Opens a tunnel. Raises Malformed, and OSError where the connection has ended."""
        own = secrets.token_hex(16)
        outbox = Outbox(hop.send)
        outbox.put(Piece(0, OPEN, own))
        answer = await hop.receive()
        pieces = [Piece.read(each) for each in answer.pieces] if isinstance(answer, Passed) else []
        if [(each.number, each.kind) for each in pieces] != [(0, OPEN)]:
            raise Malformed(f"{answer!r:.100} in answer to a tunnel")

        def put(kind: str, rest: str) -> None:
            outbox.put(Piece(0, kind, rest))

        return cls(hop, Tunnel(put, key, own, pieces[0].rest, calls=True))

    def send(self, message: Any) -> None:
        """Sends a message: beats and pieces of others' tunnels to the relay, all else to the coordinator."""
        (self._hop if isinstance(message, Beat | Passed) else self._tunnel).send(message)

    async def receive(self) -> Any:
        """Returns the next message; raises as Connection.receive. Pieces of others' tunnels come before own messages of
        the same batch, which may be the last."""
        while not self._tunnel.waiting:
            message = await self._hop.receive()
            if isinstance(message, Heard):
                return message
            if not isinstance(message, Passed):
                raise Malformed(f"{type(message).__name__} from a relay")
            if others := self._taken(map(Piece.read, message.pieces)):
                return Passed(others)
        return await self._tunnel.receive()

    def _taken(self, pieces: Iterable[Piece]) -> list[str]:
        """Takes in the own pieces; returns the others."""
        others = []
        for piece in pieces:
            if piece.number:
                others.append(str(piece))
            elif piece.kind in (PART, FRAME):
                self._tunnel.take(piece.kind, piece.rest)
            else:
                self._tunnel.end()
        return others

    def abort(self) -> None:
        """Hangs up at once."""
        self._hop.abort()

    async def close(self, seconds: float = SECONDS) -> None:
        """Sends what is unsent, within `seconds`, and hangs up."""
        await self._hop.close(seconds)

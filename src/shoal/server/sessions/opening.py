"""How a session opens: both ends prove that they know the token, agree on its key, and choose what carries it.

| client and server | hello (comm/hello.py)                                          |
| both              | 16 random bytes: with the token they make the session's key    |
| client            | Opens: which host, processes and user it sees                  |
| server            | Opened: whether memory is shared                               |
| both, if so       | Meets, twice: where the memory lies                            |
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.comm import hello
from shoal.comm.connect import this_host
from shoal.comm.processes import process_table
from shoal.comm.sealed import Seal
from shoal.comm.signed import derived
from shoal.comm.tcp import keep_alive
from shoal.elastic.records import Malformed, decode, encode, kinds
from shoal.errors import LaunchError
from shoal.native import library
from shoal.server.sessions.address import Address
from shoal.server.sessions.carriers import Carrier, Stream
from shoal.server.sessions.memory import Memory
from shoal.server.sessions.session import Session, SessionLost

HELLO_SECONDS = 5.0
"""Seconds within which a client must have proved itself."""

_MOST_TEXT = 4096


@dataclass(frozen=True)
class Opens:
    """A client's place, "" if it wants no shared memory."""

    place: str


@dataclass(frozen=True)
class Opened:
    """Whether both ends will share memory."""

    shared: bool


@dataclass(frozen=True)
class Meets:
    """What one end tells the other about shared memory (see comm/shm_segment.py)."""

    text: str


_KINDS = kinds((Opens, Opened, Meets))


def call(
    address: Address, key: bytes, reads: Mapping[str, type], seconds: float, shared: bool = True, peer: str = ""
) -> Session:
    """Opens a session with the server at `address`.

    reads: the records that may come.
    seconds: how long to wait for the server, now and for each answer.
    shared: whether memory may be shared.
    peer: what errors call the server.

    Raises SessionLost where nothing listens there or it says too little, LaunchError where the token is another.
    """
    peer = peer or f"the server at {address}"
    try:
        end = socket.create_connection(address, seconds)
    except OSError as error:
        raise SessionLost(f"{peer} cannot be reached: {error}") from error
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello.call(end, key, 0, 0, 0, seconds)
        stream = _stream(end, key, seconds, calls=True)
        stream.send(encode(Opens(_place() if shared else "")), ())
        opened = decode(stream.receive(seconds), _KINDS)
        if not isinstance(opened, Opened):
            raise Malformed(f"{type(opened).__name__} before Opened")
        return Session(_carried(stream, end, opened.shared, 1, seconds), reads, peer)
    except hello.Stranger as error:
        end.close()
        raise LaunchError(f"{peer} does not know this client's token: give both the same") from error
    except (OSError, RuntimeError, Malformed) as error:
        end.close()
        raise SessionLost(f"{peer} did not open a session: {error or type(error).__name__}") from error


def answer(end: socket.socket, key: bytes, reads: Mapping[str, type], seconds: float, peer: str) -> Session:
    """Opens the session that a client asks for over the connection `end`, which is the caller's to close where this
    fails. Raises hello.Stranger, Malformed, or OSError or RuntimeError where it is none.

    seconds: within which each piece of a message must come; between messages a client may be silent.
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(end)
    hello.answer(end, key, 0, HELLO_SECONDS)
    stream = _stream(end, key, seconds, calls=False)
    opens = decode(stream.receive(HELLO_SECONDS), _KINDS)
    if not isinstance(opens, Opens):
        raise Malformed(f"{type(opens).__name__} before Opens")
    shared = opens.place != "" and opens.place == _place() and library() is not None
    stream.send(encode(Opened(shared)), ())
    return Session(_carried(stream, end, shared, 0, seconds), reads, peer)


def _stream(end: socket.socket, key: bytes, seconds: float, *, calls: bool) -> Stream:
    mine, until = secrets.token_bytes(16), time.monotonic() + HELLO_SECONDS
    end.settimeout(HELLO_SECONDS)
    end.sendall(mine)
    theirs = hello.receive(end, 16, until)
    own = derived(key, "session", *((mine, theirs) if calls else (theirs, mine)))
    names = ("client", "server") if calls else ("server", "client")
    return Stream(end, Seal(own, names[0]), Seal(own, names[1]), seconds)


def _carried(stream: Stream, end: socket.socket, shared: bool, rank: int, seconds: float) -> Carrier:
    """Returns what carries the session: shared memory where both ends want and can have it."""
    if not shared:
        return stream

    def meet(text: str) -> list[str]:
        stream.send(encode(Meets(text)), ())
        met = decode(stream.receive(HELLO_SECONDS), _KINDS)
        if not isinstance(met, Meets) or len(met.text) > _MOST_TEXT:
            raise Malformed("no meeting in shared memory")
        return [text, met.text] if rank == 0 else [met.text, text]

    return Memory.meeting(meet, rank, end, seconds) or stream


def _place() -> str:
    """Identifies the host, the processes that see each other there, and the user: memory is shared between equals."""
    table = process_table()
    return f"{this_host()}/{table}/{os.geteuid()}" if table else ""

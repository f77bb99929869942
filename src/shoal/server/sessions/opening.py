"""How a session opens: both ends prove that they know the token, agree on its key, and choose what carries it.

| client and server | hello (comm/hello.py)                                          |
| both              | 16 random bytes: with the token they make the session's key    |
| client            | Opens: which host, processes and user it sees                  |
| server            | Opened: whether memory is shared                               |
| both, if so       | Meets, twice: where the memory lies                            |
| both, if so       | a group of their accelerators (beside.py)                      |
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from shoal.comm import hello
from shoal.comm.connect import this_host
from shoal.comm.processes import process_table
from shoal.comm.sealed import Seal
from shoal.comm.signed import derived
from shoal.comm.tcp import keep_alive
from shoal.elastic.records import Malformed, decode, encode, kinds
from shoal.errors import LaunchError, ShoalError
from shoal.launch.store import serve_on
from shoal.native import library
from shoal.server.sessions.address import Address
from shoal.server.sessions.beside import Beside, fit, told
from shoal.server.sessions.carriers import Carrier, Stream
from shoal.server.sessions.memory import Memory
from shoal.server.sessions.session import Session, SessionLost

HELLO_SECONDS = 5.0
"""Seconds within which a client must have proved itself."""

_MOST_TEXT = 4096


@dataclass(frozen=True)
class Opens:
    """A client's place, "" if it wants no shared memory; its accelerator (see beside.py)."""

    place: str
    device: str = ""


@dataclass(frozen=True)
class Opened:
    """Whether both ends will share memory. `port`: of the store where their accelerators meet; 0 where they do not."""

    shared: bool
    port: int = 0


@dataclass(frozen=True)
class Meets:
    """What one end tells the other about shared memory (see comm/shm_segment.py)."""

    text: str


class Meeting:
    """The accelerator of a server, and the store where clients' groups meet, made when the first one asks. Values there
    are signed by the session's key. `host`: where it listens."""

    def __init__(self, device: torch.device, host: str) -> None:
        self.device, self._host = device, host
        self._guard = threading.Lock()
        self._store: TCPStore | None = None

    def store(self) -> TCPStore:
        with self._guard:
            self._store = self._store or serve_on(self._host)
            return self._store


_KINDS = kinds((Opens, Opened, Meets))


def call(
    address: Address,
    key: bytes,
    reads: Mapping[str, type],
    seconds: float,
    shared: bool = True,
    peer: str = "",
    device: torch.device | None = None,
) -> Session:
    """Opens a session with the server at `address`.

    reads: the records that may come.
    seconds: how long to wait for the server, now and for each answer.
    shared: whether memory may be shared.
    peer: what errors call the server.
    device: an accelerator whose tensors go to that of the server directly, where it has another one of that kind.

    Raises SessionLost where nothing listens there or it says too little, LaunchError where the token is another.
    """
    peer = peer or f"the server at {address}"
    try:
        end = socket.create_connection(address, seconds)
    except OSError as error:
        raise SessionLost(f"{peer} cannot be reached: {error}. Is that its address, and does it run?") from error
    try:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello.call(end, key, 0, 0, 0, seconds)
        stream = _stream(end, key, seconds, calls=True)
        stream.send(encode(Opens(_place() if shared else "", told(device))), ())
        opened = decode(stream.receive(seconds), _KINDS)
        if not isinstance(opened, Opened):
            raise Malformed(f"{type(opened).__name__} before Opened")
        carrier, beside = _carried(stream, end, opened.shared, 1, seconds), None
        if opened.port and device is not None:
            patience = timedelta(seconds=HELLO_SECONDS)
            store = TCPStore(address.host, opened.port, is_master=False, wait_for_workers=False, timeout=patience)
            beside = Beside(store, stream.key, 1, device, seconds, carrier.gone)
        return Session(carrier, reads, peer, beside)
    except hello.Stranger as error:
        end.close()
        raise LaunchError(f"{peer} does not know this client's token: give both the same") from error
    except ShoalError:  # accelerators that cannot have a group
        end.close()
        raise
    except (OSError, RuntimeError, Malformed) as error:
        end.close()
        raise SessionLost(f"{peer} did not open a session: {error or type(error).__name__}") from error


def answer(
    end: socket.socket, key: bytes, reads: Mapping[str, type], seconds: float, peer: str, meeting: Meeting | None = None
) -> Session:
    """Opens the session that a client asks for over the connection `end`, which is the caller's to close where this
    fails. Raises hello.Stranger, Malformed, or OSError or RuntimeError where it is none.

    seconds: within which each piece of a message must come; between messages a client may be silent.
    meeting: this end's accelerator, and where others meet it.
    """
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(end)
    hello.answer(end, key, 0, HELLO_SECONDS)
    stream = _stream(end, key, seconds, calls=False)
    opens = decode(stream.receive(HELLO_SECONDS), _KINDS)
    if not isinstance(opens, Opens):
        raise Malformed(f"{type(opens).__name__} before Opens")
    shared = opens.place != "" and opens.place == _place() and library() is not None
    store = meeting.store() if meeting is not None and fit(opens.device, told(meeting.device)) else None
    stream.send(encode(Opened(shared, 0 if store is None else store.port)), ())
    carrier, beside = _carried(stream, end, shared, 0, seconds), None
    if store is not None and meeting is not None:
        beside = Beside(store, stream.key, 0, meeting.device, seconds, carrier.gone)
    return Session(carrier, reads, peer, beside)


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

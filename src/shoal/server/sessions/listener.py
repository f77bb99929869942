"""Where a server listens: each client that proves itself gets a session in a thread of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from shoal.comm.hello import Stranger
from shoal.comm.stalls import Say, to_stderr
from shoal.elastic.records import Malformed
from shoal.errors import LaunchError, ShoalError
from shoal.server.sessions.address import Address
from shoal.server.sessions.opening import Meeting, answer
from shoal.server.sessions.session import Session, SessionLost

PENDING = 32
"""Connections that are heard at the same time before they have proved themselves; further ones are hung up on."""

_REST_SECONDS = 0.1  # after a connection that could not be accepted


class Listener:
    """Listens on one address, port 0 for a free one, until it is closed.

    key: proves who may come.
    reads: the records that clients may send.
    serve: runs a session, in a thread of its own, until the client leaves. What it raises ends that session alone.
    seconds: within which each piece of a message must move.
    say: gets a line for each client that is refused or lost.
    device: an accelerator whose tensors go to that of a client directly, where it has another one of that kind.

    Raises LaunchError where the address cannot be listened on.
    """

    def __init__(
        self,
        address: Address,
        key: bytes,
        reads: Mapping[str, type],
        serve: Callable[[Session], None],
        seconds: float = 60.0,
        say: Say = to_stderr,
        device: torch.device | None = None,
    ) -> None:
        try:
            self._server = socket.create_server(address, family=address.family, backlog=1024)
        except OSError as error:
            raise LaunchError(f"the address {address} cannot be listened on: {error}. Choose another") from error
        self.address = Address(address.host, int(self._server.getsockname()[1]))
        self._key, self._reads, self._serve, self._seconds, self._say = key, reads, serve, seconds, say
        self._meeting = None if device is None else Meeting(device, address.host)
        self._closed = False
        self._guard = threading.Lock()
        self._unproven: set[socket.socket] = set()
        self._sessions: dict[Session, threading.Thread] = {}
        self._accepting = threading.Thread(target=self._accept, name="shoal-listen", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Listens no more and ends all sessions."""
        self._closed = True
        with suppress(OSError):  # wakes the thread that accepts
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._accepting.join()
        with self._guard:
            ends, sessions = list(self._unproven), dict(self._sessions)
        for end in ends:  # their threads close them
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for session in sessions:
            session.end()
        for thread in sessions.values():
            if thread is not threading.current_thread():
                thread.join(self._seconds)

    def _accept(self) -> None:
        while not self._closed:
            try:
                end, (host, port, *_) = self._server.accept()
            except OSError as error:  # out of descriptors, the other side was gone already, or it is closed
                if not self._closed:
                    self._say(f"shoal: a connection was not accepted: {error}")
                    time.sleep(_REST_SECONDS)
                continue
            with self._guard:
                full = len(self._unproven) >= PENDING
                if not full:
                    self._unproven.add(end)
            if full:
                self._say(f"shoal: {host} was hung up on: {PENDING} connections have not proved themselves yet")
                end.close()
                continue
            name = f"{host}:{port}"
            threading.Thread(target=self._hear, args=(end, name), name=f"shoal-session-{name}", daemon=True).start()

    def _hear(self, end: socket.socket, name: str) -> None:
        """Opens the session of a client and serves it."""
        try:
            session = answer(end, self._key, self._reads, self._seconds, name, self._meeting)
        except (Stranger, Malformed, ShoalError, OSError, RuntimeError) as error:
            why = "it does not know the token" if isinstance(error, Stranger) else f"{type(error).__name__}: {error}"
            if not self._closed:
                self._say(f"shoal: {name} was refused: {why}")
            end.close()
            return
        finally:
            with self._guard:
                self._unproven.discard(end)
        with self._guard:
            self._sessions[session] = threading.current_thread()
        try:
            if not self._closed:
                self._serve(session)
        except Malformed as error:
            self._say(f"shoal: {session.peer} was hung up on: it sent {error}")
        except SessionLost as error:
            if not self._closed:
                self._say(f"shoal: {error}")
        except Exception as error:  # a mistake in what one client asked for must not end the others' server
            self._say(f"shoal: the session with {session.peer} has failed: {type(error).__name__}: {error}")
        finally:
            session.close()
            with self._guard:
                self._sessions.pop(session, None)

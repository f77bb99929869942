"""A remote module's way to its owner: sessions, as many as calls are under way at once, and a thread that tells what is
not needed any more."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

import torch
from torch._guards import active_fake_mode

from shoal.elastic.records import Malformed
from shoal.errors import LaunchError, RemoteError, ShoalError, UserError
from shoal.server.remote.messages import TO_CLIENT, Build, Built, Drop, Failed, Join, Leave, Release, Returned
from shoal.server.remote.payload import NOTHING, Payload, receive, written
from shoal.server.sessions import Address, Session, SessionLost, call

_MOST_NUMBERS = 2000  # of forwards that one Release names
_MOST_BYTES = 1 << 38  # that an owner may answer: it is trusted with the model
_END_SECONDS = 5.0  # for which a process that ends waits until its owners have been told

_open: WeakSet[Link] = WeakSet()


class Link:
    """The way to one module at the owner at `address`. `build` is to be called first.

    timeout: seconds for which the owner may be silent, while it computes too.
    shared: use shared memory where the owner is on this host.
    device: an accelerator whose tensors go to that of the owner directly.
    """

    def __init__(
        self, address: Address, key: bytes, timeout: float, shared: bool, device: torch.device | None = None
    ) -> None:
        self.device: torch.device | None = None  # that of both ends, once a session has it
        self._given = device
        self._address, self._key, self._timeout, self._shared = address, key, timeout, shared
        self.client, self._module, self._pid = secrets.token_hex(8), "", os.getpid()
        self.peer = f"the owner at {address}"
        self._guard = threading.Lock()
        self._idle: list[Session] = []
        self._closed = False
        self._unneeded: SimpleQueue[int | str | None] = SimpleQueue()  # put may be called from a finalizer
        self._telling: threading.Thread | None = None

    def build(self, factory: str, name: str, seed: int, arguments: Payload) -> bool:
        """Has the module built, or found by its name; returns its mode. Raises what `ask` does."""
        self.peer = f"{factory} of the owner at {self._address}"
        raw = written(arguments)
        with self._session(joined=False) as session:
            session.send(Build(self.client, factory, name, seed), *raw)
            built = self._answer(session, Built)
        self._module = built.module
        return bool(built.training)

    def ask(self, record: Any, payload: Payload = NOTHING) -> Payload:
        """Returns what the owner answers, at once with other threads. Raises SessionLost where the owner is gone or
        silent, RemoteError where the module has raised, UserError where the request is at fault; all name the owner."""
        with self._session(joined=True) as session:
            session.send(record, *written(payload, session.device))
            self._answer(session, Returned)
            return receive(session, _MOST_BYTES)

    def release(self, number: int) -> None:
        """Tells, some time soon, that no backward of this forward will follow. A finalizer may call it."""
        self._unneeded.put(number)

    def forget(self, context: str) -> None:
        """Has the gradients of a context dropped, some time soon."""
        self._unneeded.put(context)

    def close(self) -> None:
        """Leaves the owner, some time soon. A finalizer may call it."""
        self._unneeded.put(None)

    @contextmanager
    def _session(self, *, joined: bool) -> Iterator[Session]:
        """A session for one request and its answer; it is closed where they are not both complete."""
        if os.getpid() != self._pid:
            raise UserError(f"{self.peer} was reached by the process that forked this one: make a remote module here")
        if active_fake_mode() is not None or torch.empty(0).is_meta:
            raise NotImplementedError(f"{self.peer} has values, and here tensors are without (fake, or meta)")
        with self._guard:
            if self._closed:
                raise LaunchError(f"the remote module of {self.peer} has been closed")
            session = self._idle.pop() if self._idle else None
            if self._telling is None:
                self._telling = threading.Thread(target=self._tell, name="shoal-remote", daemon=True)
                self._telling.start()
                _open.add(self)
        session = session or self._open(joined)
        try:
            yield session
        except (RemoteError, UserError):  # the owner's answer
            self._put_back(session)
            raise
        except Malformed as error:
            session.close()
            raise LaunchError(f"{self.peer} has sent {error}") from error
        except BaseException:  # bytes under way would be taken for the next message's
            session.close()
            raise
        self._put_back(session)

    def _put_back(self, session: Session) -> None:
        with self._guard:
            if not self._closed and not session.forms:
                self._idle.append(session)
                return
        session.close()

    def _open(self, joined: bool) -> Session:
        session = call(self._address, self._key, TO_CLIENT, self._timeout, self._shared, self.peer, self._given)
        self.device = session.device
        if joined:
            try:
                session.send(Join(self.client, self._module), *written(NOTHING))
                self._answer(session, Built)
            except BaseException:
                session.close()
                raise
        return session

    def _answer(self, session: Session, kind: type) -> Any:
        answer = session.receive(self._timeout)
        if isinstance(answer, Failed):
            raise (UserError if answer.wrong else RemoteError)(f"{self.peer}: {answer.why}")
        if not isinstance(answer, kind):
            raise Malformed(f"{type(answer).__name__} instead of {kind.__name__}")
        return answer

    def _tell(self) -> None:
        """Tells the owner what is not needed any more, until the link is closed."""
        while not self._closed:
            told = [self._unneeded.get()]
            with suppress(Empty):
                while len(told) < _MOST_NUMBERS:
                    told.append(self._unneeded.get_nowait())
            with suppress(ShoalError):  # an owner that is gone needs to be told nothing
                if numbers := [each for each in told if isinstance(each, int)]:
                    self.ask(Release(numbers))
                for context in dict.fromkeys(each for each in told if isinstance(each, str)):
                    self.ask(Drop(context))
            if None in told:
                with self._guard:
                    self._closed = True
                    idle, self._idle = self._idle, []
                for session in idle:
                    with suppress(SessionLost):
                        session.send(Leave())
                    session.close()


@atexit.register
def _leave_all() -> None:
    """Leaves all owners. A thread that is still at work when the interpreter goes is ended inside torch, which takes
    that for an error and aborts the process."""
    leaving = list(_open)
    for link in leaving:
        link.close()
    until = time.monotonic() + _END_SECONDS
    for link in leaving:
        if link._telling is not None:
            link._telling.join(max(0.0, until - time.monotonic()))

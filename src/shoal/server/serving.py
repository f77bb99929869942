"""What servers have in common: an address guarded by a token, clients in threads of their own, an end."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import torch

from shoal.comm.secret import new_secret
from shoal.comm.stalls import Say
from shoal.server.sessions import Address, Listener, Session, key_of_token


class Serving:
    """Serves from `_listen` until it is closed.

    token: guards the address; None for a new one, which `token` then tells.
    """

    def __init__(self, token: str | None) -> None:
        self.token = token or new_secret()
        self._key = key_of_token(self.token)
        self._closed = threading.Event()

    def _listen(
        self, address: str, reads: Mapping[str, type], seconds: float, say: Say, device: torch.device | None = None
    ) -> None:
        """Begins to serve, once everything else is there: see `Listener`. Raises LaunchError where the address cannot
        be listened on."""
        self._listener = Listener(Address.read(address), self._key, reads, self._serve, seconds, say, device)

    def _serve(self, session: Session) -> None:
        """Answers one client until it leaves."""
        raise NotImplementedError

    def _end(self) -> None:
        """Gives back what is held, once no client is served any more."""

    @property
    def address(self) -> str:
        """Where it listens."""
        return str(self._listener.address)

    def wait(self) -> None:
        """Returns when the server has been closed."""
        self._closed.wait()

    def close(self) -> None:
        """Ends all sessions and the server. What was acknowledged is kept."""
        if not self._closed.is_set():
            self._listener.close()
            self._end()
            self._closed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

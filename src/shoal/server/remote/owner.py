"""An owner of modules, which others call by `shoal.remote`."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.comm.stalls import Say, to_stderr
from shoal.elastic.records import Malformed
from shoal.errors import UserError
from shoal.server.options import check_seconds
from shoal.server.remote import payload
from shoal.server.remote.exposed import Client, Exposed
from shoal.server.remote.messages import (
    FROM_CLIENT,
    Backward,
    Build,
    Built,
    Drop,
    Failed,
    Forward,
    Join,
    Leave,
    Load,
    Measure,
    Optimize,
    Release,
    Returned,
    Save,
    Update,
)
from shoal.server.remote.payload import NOTHING, Payload
from shoal.server.remote.registry import Factory, Holdings, Registry, exposed_factories
from shoal.server.serving import Serving
from shoal.server.sessions import Session, accelerator

_JOIN_SECONDS = 10.0
_MOST_TEXT = 4000  # characters of an error that is told


@dataclass(frozen=True)
class OwnerOptions:
    """Further options of an owner.

    graphs: the most forwards of one remote module that wait for their backward.
    modules: the most modules at once.
    message_bytes: the most bytes of a message.
    seconds: within which each piece of a message must move.
    say: gets a line for each client that is refused or lost.
    device: an accelerator whose tensors go to those of clients (`shoal.remote(..., device=)`) directly.
    """

    graphs: int = 4096
    modules: int = 1024
    message_bytes: int = 1 << 32
    seconds: float = 60.0
    say: Say = to_stderr
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        for name in ("graphs", "modules", "message_bytes"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise UserError(f"OwnerOptions({name}={value!r:.100}): give a number from 1 on")
        check_seconds("OwnerOptions(seconds", self.seconds, above_0=True)


class Owner(Serving):
    """Builds modules that clients ask for by `shoal.remote`, and runs them, from its construction until it is closed,
    in threads of its own. A module lives as long as the client that has asked for it; one with a name lives as long as
    the owner.

    factories: what clients may have built, and nothing else: a dict from names to classes, functions, or modules that
        are there already, which all clients share; or a list of classes, functions, or "package.module:name".
    address: host:port; port 0 for a free one.
    token: guards the address; None for a new one, which `token` then tells.
    options: see `OwnerOptions`.

    Raises UserError for factories that are none, LaunchError where the address cannot be listened on.
    """

    def __init__(
        self,
        factories: Mapping[str, Factory] | Iterable[Factory | str],
        address: str = "127.0.0.1:0",
        token: str | None = None,
        options: OwnerOptions | None = None,
    ) -> None:
        super().__init__(token)
        options = options or OwnerOptions()
        self._registry = Registry(exposed_factories(factories), options.modules, options.graphs)
        self._most_bytes = options.message_bytes
        self._device = accelerator(options.device)
        self._listen(address, FROM_CLIENT, options.seconds, options.say, self._device)

    def holdings(self) -> Holdings:
        """Returns how much there is of what clients have left here."""
        return self._registry.holdings()

    def _serve(self, session: Session) -> None:
        # In a new thread MKL takes all cores until it is told, and other bits come of it than in the main one.
        torch.set_num_threads(torch.get_num_threads())
        accelerator(self._device)
        first = session.receive(_JOIN_SECONDS)
        given = payload.receive(session, self._most_bytes)
        if not isinstance(first, Build | Join):
            raise Malformed(f"{type(first).__name__} before Build or Join")
        builds = isinstance(first, Build)
        try:
            key = self._registry.build(first, given) if isinstance(first, Build) else first.module
            exposed, client = self._registry.enter(key, first.client, first=builds)
        except Exception as error:
            session.send(_failed(error))
            return
        try:
            session.send(Built(key, exposed.module.training))
            while not isinstance(asked := session.receive(), Leave):
                self._answer(session, exposed, client, asked)
        finally:
            self._registry.leave(key, first.client)

    def _answer(self, session: Session, exposed: Exposed, client: Client, asked: Any) -> None:
        """Answers a request; what it raises is told to the client."""
        given = payload.receive(session, self._most_bytes)
        try:
            answer = payload.written(_done(exposed, client, asked, given), session.device)
        except Malformed:
            raise
        except Exception as error:
            session.send(_failed(error))
            return
        session.send(Returned(), *answer)


def _done(exposed: Exposed, client: Client, asked: Any, given: Payload) -> Payload:
    if isinstance(asked, Forward):
        return exposed.forward(client, asked, given)
    if isinstance(asked, Backward):
        return exposed.backward(client, asked, given.value(given.tensors))
    if isinstance(asked, Release):
        client.graphs.release(*asked.numbers)
    elif isinstance(asked, Drop):
        exposed.drop(asked.context)
    elif isinstance(asked, Optimize):
        exposed.updates.make(client, asked, given.value(given.tensors))
    elif isinstance(asked, Measure):
        return payload.taken_apart(exposed.updates.measure(asked), grad=False)
    elif isinstance(asked, Update):
        exposed.updates.update(asked, given.value(given.tensors))
    elif isinstance(asked, Save):
        return payload.taken_apart(exposed.state(), grad=False)
    elif isinstance(asked, Load):
        return payload.taken_apart(exposed.load(given.value(given.tensors)), grad=False)
    else:
        raise Malformed(f"{type(asked).__name__} in the middle of a session")
    return NOTHING


def _failed(error: Exception) -> Failed:
    if isinstance(error, UserError):
        return Failed(str(error)[:_MOST_TEXT], wrong=True)
    where = "".join(traceback.format_tb(error.__traceback__)[-3:])
    return Failed(f"{type(error).__name__}: {error}"[:_MOST_TEXT] + f"\n{where}"[:_MOST_TEXT].rstrip(), wrong=False)

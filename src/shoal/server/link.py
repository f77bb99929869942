"""A client's way to one server: asks, and asks again where the server was lost meanwhile."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from shoal.device import CPU
from shoal.elastic.records import Malformed
from shoal.errors import LaunchError, UserError
from shoal.server.carried import Carried
from shoal.server.layout import Layout
from shoal.server.messages import (
    TO_CLIENT,
    WEIGHTS,
    Admitted,
    Ask,
    Done,
    Join,
    Leave,
    Order,
    Pull,
    Push,
    Refused,
    Taken,
    Values,
    Work,
)
from shoal.server.sessions import Address, Session, SessionLost, call
from shoal.server.sessions.session import Form

_MARGIN_SECONDS = 5.0  # beyond what a server itself waits for others, until it counts as silent
_RETRY_SECONDS = 0.05

T = TypeVar("T")


@dataclass(frozen=True)
class About:
    """What a push tells beside its gradient; see messages.Push."""

    count: float = 1.0
    ticket: int = -1
    note: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TableForm:
    """A table as clients see it: `rows` of `width` numbers of `dtype`, in blocks of `block` among the servers (see
    shares.Rows). joined: its gradients come with those of the weights. here: how many of its numbers a server has,
    where it says so."""

    rows: int
    width: int
    block: int = 1
    dtype: str = "float32"
    joined: bool = False
    here: int = 0

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> TableForm:
        """Reads what a server has told."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in table.items() if key in known})

    def empty(self, rows: int, device: torch.device = CPU) -> Tensor:
        """Returns memory for the values of some rows."""
        return torch.empty(rows, self.width, dtype=getattr(torch, self.dtype), device=device)


class Link:
    """The way to the server at `address`. For `timeout` seconds it tries to reach a server that was lost; `incarnation`
    is this client's name. `join` is to be called first.

    wanted: an accelerator whose tensors go to that of the server directly, where it has another one of that kind.
    device: where tensors come and go: that accelerator, or the CPU where the server has none.
    shapes: of the parameters that the server has, by name.
    tables: its tables, by name.
    statistics: those of BatchNorm that were pulled last (fp64, flat); None where the server has none.
    """

    def __init__(
        self,
        address: Address,
        key: bytes,
        incarnation: str,
        timeout: float,
        shared: bool,
        wanted: torch.device | None = None,
    ) -> None:
        self._address, self._key, self._incarnation = address, key, incarnation
        self._timeout, self._shared, self._wanted = timeout, shared, wanted
        self._session: Session | None = None
        self._closed = False
        self._rank = -1
        self._about: dict[str, Any] = {}
        self._carried: Carried | None = None
        self.device = CPU
        self.tables: dict[str, TableForm] = {}
        self._sequence: Counter[str] = Counter()

    def join(self, rank: int) -> int:
        """Joins the server, -1 for any rank; returns the rank."""
        self._rank = rank
        self._ask(lambda session: None)
        self.tables = {name: TableForm.from_json(each) for name, each in self._about.items() if name != WEIGHTS}
        if WEIGHTS in self._about:
            self._carried = Carried(Layout.from_json(self._about[WEIGHTS]), self.device)
        return self._rank

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {} if self._carried is None else self._carried.shapes

    @property
    def statistics(self) -> Tensor | None:
        carried = self._carried
        return carried.weights[-1] if carried is not None and carried.layout.statistics else None

    def pull(self, parameters: Mapping[str, Tensor]) -> int:
        """Copies the server's weights into those of `parameters` that it has; returns their version."""
        carried = self._carried
        if carried is None:
            return 0
        carried.move(self.device)
        version = self._ask(lambda session: self._pulled(session, WEIGHTS, carried.weights))
        carried.put(parameters)
        return version

    def ask(self, seconds: float, found: Mapping[str, Any]) -> Work:
        """Asks for work; see messages.Ask."""

        def asked(session: Session) -> Work:
            session.send(Ask(seconds, dict(found)))
            return self._answer(session, Work)

        return self._ask(asked)

    def push(
        self,
        gradients: Mapping[str, Tensor | None],
        version: int,
        about: About,
        term: Tensor | None = None,
        rows: Sequence[Tensor] = (),
    ) -> Taken:
        """Brings the gradients of the parameters that the server has. `term`: what their forwards add to its
        statistics, None for nothing. `rows`: of each table that is joined the rows and their gradients."""
        if self._carried is None:
            return Taken(version, 0, 1.0)
        self._carried.move(self.device)
        untouched, raw = self._carried.gather(gradients)
        if self.statistics is not None:
            raw = [*raw, torch.zeros_like(self.statistics) if term is None else term]
        try:
            taken = self._push(WEIGHTS, version, untouched, about, *raw, *rows)
        except UserError:  # refused
            self._carried.take_back()
            raise
        if not (taken.weight and about.count):
            self._carried.take_back()
        return taken

    def take_back(self) -> None:
        """Notes that no update is made of the last push, after all."""
        if self._carried is not None:
            self._carried.take_back()

    def pull_rows(self, table: str, rows: Tensor) -> tuple[int, Tensor]:
        """Returns version and values of rows that this server has, whose numbers are on the CPU."""
        values = self.tables[table].empty(len(rows), self.device)
        return self._ask(lambda session: self._pulled(session, table, [values], rows)), values

    def push_rows(self, table: str, rows: Tensor, gradients: Tensor, version: int) -> Taken:
        """Brings the gradients of rows that this server has, each once and in ascending order; their numbers are on the
        CPU."""
        return self._push(table, version, [], About(), rows, gradients)

    def order(self, order: Order) -> Done:
        """Tells a follower what to do, until it has done it."""

        def ordered(session: Session) -> Done:
            session.send(order)
            return self._answer(session, Done)

        return self._ask(ordered)

    def close(self, last: Order | None = None) -> None:
        """Leaves the server, after a `last` order if there is one; nothing is asked any more."""
        self._closed = True
        if self._session is not None:
            with suppress(SessionLost):  # it is gone already
                if last is not None:
                    self._session.send(last)
                self._session.send(Leave())
            self._drop()

    def _pulled(self, session: Session, part: str, into: list[Tensor], *asked: Tensor) -> int:
        session.send(Pull(part, self._timeout), *asked)
        answer = self._answer(session, Values)
        session.fill(*into)
        return int(answer.version)

    def _push(self, part: str, version: int, untouched: list[str], about: About, *raw: Tensor) -> Taken:
        push = Push(part, version, self._sequence[part] + 1, untouched, about.count, about.ticket, dict(about.note))

        def pushed(session: Session) -> Taken:
            session.send(push, *raw)
            return self._answer(session, Taken)

        taken = self._ask(pushed)
        self._sequence[part] += 1
        return taken

    def _ask(self, ask: Callable[[Session], T]) -> T:
        """Asks the server, anew where it was lost meanwhile. Raises LaunchError once `timeout` is over, UserError for a
        link that is closed."""
        if self._closed:
            raise UserError(f"the client of the server at {self._address} has been closed: connect once more")
        until = time.monotonic() + self._timeout
        while True:
            try:
                if self._session is None:
                    self._session = self._open()
                return ask(self._session)
            except SessionLost:
                self._drop()
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_SECONDS)
            except Malformed as error:
                self._drop()
                raise LaunchError(f"the server at {self._address} has sent {error}") from error
            except (UserError, LaunchError):  # the server's answer
                raise
            except BaseException:  # bytes under way would be taken for the next message's
                self._drop()
                raise

    def _open(self) -> Session:
        patience = self._timeout + _MARGIN_SECONDS
        session = call(self._address, self._key, TO_CLIENT, patience, self._shared, device=self._wanted)
        try:
            session.send(Join(self._rank, self._incarnation))
            self._rank = self._answer(session, Admitted).rank
            (raw,) = session.tensors([Form(torch.uint8, form.numel) for form in session.forms[:1]])
            about = json.loads(bytes(raw.numpy()))
        except BaseException:
            session.close()
            raise
        if self._about not in ({}, about):
            session.close()
            raise LaunchError(f"the server at {self._address} has other parameters than before")
        self._about, self.device = about, session.device or CPU
        return session

    def _answer(self, session: Session, kind: type[T]) -> T:
        answer = session.receive(self._timeout + _MARGIN_SECONDS)
        if isinstance(answer, Refused):
            raise (LaunchError if answer.late else UserError)(f"the server at {self._address}: {answer.why}")
        if not isinstance(answer, kind):
            raise Malformed(f"{type(answer).__name__} instead of {kind.__name__}")
        return answer

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

"""A parameter server: weights and tables that clients pull, and update by the gradients that they push."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from shoal.assembly.arguments import check_optimizer
from shoal.comm.secret import find_secret
from shoal.comm.stalls import Say, to_stderr
from shoal.device import CPU, finish, synchronize
from shoal.elastic.records import Malformed
from shoal.errors import ShoalError, UserError
from shoal.optim.fused.optimizer import OptimizerFactory
from shoal.plan import Option
from shoal.server.follower import Follower
from shoal.server.held import Given, Held
from shoal.server.keeping import Keeping, NotDone
from shoal.server.layout import described
from shoal.server.messages import (
    FROM_CLIENT,
    WEIGHTS,
    Admitted,
    Ask,
    Join,
    Leave,
    Order,
    Pull,
    Push,
    Refused,
    Values,
)
from shoal.server.options import Options
from shoal.server.part import Part
from shoal.server.policies import Policy, check_policy
from shoal.server.reading import Reading
from shoal.server.serving import Serving
from shoal.server.sessions import Session, SessionLost, accelerator
from shoal.server.table import TableRows
from shoal.server.weights import Weights

Served = Part | Follower | Reading
_JOIN_SECONDS = 10.0
_LEAVING_SECONDS = 1.0
_MOST_WAIT = 3600.0  # seconds that a client may ask a pull to wait


@dataclass(frozen=True)
class Statistics:
    """What a part has seen: pushes, those that were dropped, updates, and how often each staleness and lag."""

    pushes: int
    dropped: int
    updates: int
    staleness: dict[int, int]
    lags: dict[int, int]


class ParameterServer(Serving):
    """Serves parameters from its construction until it is closed, in threads of its own.

    params: a model, or a dict of tensors by name. The server has a copy.
    optimizer: takes a list of parameter groups, e.g. `partial(torch.optim.SGD, lr=0.1)`; tables have one each.
    policy: when to update, and who waits: Sync(n), Batch(k), BoundedStaleness(s) or Async().
    codec: how gradients travel: None as they are, "fp16", "bf16", "u8", "u4", "sign", or a table with parameters.
    address: host:port; port 0 for a free one.
    token: guards the address; None for a new one, which `token` then tells.
    directory: of checkpoints and journals, from which a server that is started again goes on, the same for all of
        several servers, which see it alike; None keeps nothing.
    options: see `Options`.

    Raises UserError for what does not fit together, LaunchError where the address cannot be listened on.
    """

    def __init__(
        self,
        params: Given,
        optimizer: OptimizerFactory,
        policy: Policy,
        codec: Option | None = None,
        address: str = "127.0.0.1:0",
        token: str | None = None,
        directory: str | Path | None = None,
        options: Options | None = None,
    ) -> None:
        super().__init__(token)
        check_policy(policy)
        check_optimizer(optimizer)
        options = options or Options()
        device = accelerator(options.device)
        keeping = Keeping(Path(directory) if directory else None, options.save_every, options.durable, options.grace)
        parts: dict[str, Part] = {}
        if mine := options.names_of(params):
            held = Held(params, mine, buffers=options.share.index == 0)
            also = options.schedule, options.param_groups, device or CPU
            weights = Weights.of(held, optimizer, codec or "fp32", *also)
            having = min(options.share.count, options.dense(params))  # the first ones have one each
            kept = keeping.of("weights", options.share.index, having, merged=True)
            parts[WEIGHTS] = Part(weights, policy, kept)
        for name, table in options.tables.items():
            rows = TableRows(table, optimizer, options.share, device or CPU)
            kept = keeping.of(f"table-{name}", options.share.index, options.share.count, merged=False)
            parts[name] = Part(rows, policy, kept)
        self._serve_parts(parts, address, options.seconds, options.say, device)

    @classmethod
    def of(
        cls, part: Part | Follower, address: str, token: str | None, seconds: float = 60.0, say: Say = to_stderr
    ) -> Self:
        """Serves weights that are made already, with their tables, from where they are. token: None for the user's
        secret."""
        server = cls.__new__(cls)
        Serving.__init__(server, token or find_secret().decode())
        tables = part.values.tables if isinstance(part.values, Weights) else ()
        read = {each.name: Reading(part, each) for each in tables}
        server._serve_parts({WEIGHTS: part, **read}, address, seconds, say, accelerator(part.values.device))
        return server

    def _serve_parts(
        self, parts: Mapping[str, Served], address: str, seconds: float, say: Say, device: torch.device | None
    ) -> None:
        self._parts, self._device = parts, device
        self._guard = threading.Lock()
        self._here: dict[int, tuple[str, Session]] = {}
        if device is not None:
            finish(device)  # sessions have threads of their own, with the device's default stream
        self._listen(address, FROM_CLIENT, seconds, say, device)

    @property
    def version(self) -> int:
        """The number of updates of the weights."""
        return self._parts[WEIGHTS].ledger.version

    def statistics(self, part: str = WEIGHTS) -> Statistics:
        """Returns what the weights, or a table by its name, have seen."""
        if part not in self._parts:
            raise UserError(
                f"the server has no table {part!r}: it has {', '.join(filter(None, self._parts)) or 'none'}"
            )
        ledger = self._parts[part].ledger
        counts = dict(sorted(ledger.staleness.items() or ledger.lags.items())), dict(sorted(ledger.lags.items()))
        return Statistics(ledger.pushes, ledger.dropped, ledger.version, *counts)

    def clients(self) -> list[int]:
        """Returns the numbers of the clients that are connected."""
        with self._guard:
            return sorted(self._here)

    def _end(self) -> None:
        if self._device is not None:
            synchronize(self._device)
        for part in self._parts.values():
            try:
                part.end_well()
            finally:
                part.close()

    def _serve(self, session: Session) -> None:
        """Answers one client until it leaves."""
        accelerator(self._device)
        join = session.receive(_JOIN_SECONDS)
        if not isinstance(join, Join):
            raise Malformed(f"{type(join).__name__} before Join")
        try:
            rank = self._admit(join, session)
        except NotDone as error:
            session.send(Refused(str(error), late=False))
            return
        lost = True
        try:
            for part in self._parts.values():
                part.join(rank, join.incarnation)
            about = {name: part.values.to_json() for name, part in self._parts.items()}
            session.send(Admitted(rank), described(about))
            rooms: dict[str, list[Tensor]] = {}
            while not isinstance(asked := session.receive(), Leave):
                self._answer(session, rank, join.incarnation, asked, rooms)
            lost = False
        finally:
            with self._guard:
                gone = self._here.get(rank, ("", None))[1] is session
                if gone:
                    del self._here[rank]
            for part in self._parts.values() if gone else ():
                part.leave(rank, lost)

    def _admit(self, join: Join, session: Session) -> int:
        """Returns the client's rank. A client that comes again ends the session that it has left behind; two clients of
        one rank are refused, unless the first one is just about to leave."""
        until = time.monotonic() + _LEAVING_SECONDS
        while True:
            with self._guard:
                known = {rank for part in self._parts.values() for rank in part.ledger.members}
                rank = join.rank if join.rank >= 0 else next(r for r in range(len(known) + 1) if r not in known)
                before = self._here.get(rank)
                if before is None or before[0] == join.incarnation:
                    self._here[rank] = join.incarnation, session
                    break
            if time.monotonic() > until:
                raise NotDone(f"client {rank} is connected already, from {before[1].peer}: give each client its rank")
            time.sleep(_LEAVING_SECONDS / 50)
        session.peer = f"client {rank} ({session.peer})"
        if before is not None:
            before[1].end()
        return rank

    def _answer(
        self, session: Session, rank: int, incarnation: str, asked: object, rooms: dict[str, list[Tensor]]
    ) -> None:
        """Answers a request; what others have not done in time, or what does not fit, is told to the client."""
        part = self._parts.get(getattr(asked, "part", WEIGHTS))
        orders = isinstance(asked, Order) and isinstance(part, Follower)
        if part is None or not (orders or isinstance(asked, Pull | Push | Ask)):
            raise Malformed(f"{type(asked).__name__}, which nothing here answers")
        try:
            if isinstance(asked, Order) and isinstance(part, Follower):
                session.send(part.ordered(asked))
                return
            if isinstance(asked, Ask):
                session.send(part.deal(rank, min(max(asked.seconds, 0.0), _MOST_WAIT), asked.found))
                return
            if isinstance(asked, Push):
                raw = part.values.room(session.forms)
                session.fill(*raw)
                session.send(part.push(rank, incarnation, asked, raw))
                return
            assert isinstance(asked, Pull)
            numbers = part.values.asked(session.forms)
            session.fill(*numbers)
            room = rooms.setdefault(asked.part, [])
            seconds = min(max(asked.seconds, 0.0), _MOST_WAIT)
            device = session.device or CPU
            version, rooms[asked.part] = part.pull(rank, numbers, seconds, room, device)
            session.send(Values(version), *rooms[asked.part])
        except (SessionLost, Malformed):
            raise
        except ShoalError as error:
            session.send(Refused(str(error), late=getattr(error, "late", False)))

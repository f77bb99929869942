"""Each but the first of several servers of a job: it keeps what workers push until the first one says what becomes of
it.

    worker  --push-->  followers, which keep it and say so
    worker  --push-->  first server: policy, tickets, accounts; it decides
    first   --Sum, Apply, Keep-->  followers

So all servers make the same updates, of the same gradients in the same order, as one server would. What a follower has
said that it has, it has also after it was killed: pushes and updates are in its journal before they are answered, and
an order that comes again changes nothing.
"""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.directory import clean, completed
from shoal.checkpoint.manifest import read_manifest
from shoal.errors import CheckpointError
from shoal.server.journal import Journal, on_host
from shoal.server.keeping import NotDone
from shoal.server.ledger import Gradient, Ledger, Update
from shoal.server.messages import Apply, Begin, Done, Finish, Keep, Order, Push, Sum, Taken, Work
from shoal.server.policies import Async
from shoal.server.weights import Weights

Key = tuple[int, str, int]
"""A push: the client's rank, its incarnation, the number of the push."""


class Follower:
    """Holds `values`, a share of a job's weights, kept in `directory`. Its methods may be called from any thread.

    expects: the line (see messages.Begin) of the run's newest checkpoint; a follower that has it goes on at once.
    durable: wait for the disk before anything is answered.
    """

    def __init__(self, values: Weights, directory: Path, durable: bool, expects: str = "") -> None:
        self.values, self._directory, self._durable = values, directory, durable
        self.ledger = Ledger(Async())
        self._changed = threading.Condition()
        self._line = ""
        self._held: dict[Key, tuple[dict[str, Any], list[Tensor], Gradient]] = {}
        self._journal: Journal | None = None
        self._rows: dict[int, list[list[float]]] = {}
        self._summed = 0
        self.broken: Exception | None = None
        """What has kept an update that is in the journal from being made: nothing here can be relied on any more."""
        self.finished = threading.Event()
        """The first server has ended."""
        clean(directory)
        if expects and self._last().get("line") == expects:
            self._recall()

    def join(self, rank: int, incarnation: str) -> None:
        """Does nothing: a push opens the account."""

    def leave(self, rank: int, lost: bool) -> None:
        """Does nothing: the first server says what becomes of a client's pushes."""

    def deal(self, rank: int, seconds: float, found: Mapping[str, Any]) -> Work:
        raise NotDone("the first server deals the work of a job")

    def pull(
        self, rank: int, asked: Sequence[Tensor], seconds: float, into: list[Tensor], device: torch.device
    ) -> tuple[int, list[Tensor]]:
        """Returns version and values."""
        return self.read(lambda: self.values.read(asked, into, device), seconds)

    def read(self, values: Callable[[], list[Tensor]], seconds: float) -> tuple[int, list[Tensor]]:
        """Returns the version, and what `values` gives, between two updates."""
        with self._begun(seconds):
            return self.ledger.version, values()

    def push(self, rank: int, incarnation: str, push: Push, raw: list[Tensor]) -> Taken:
        """Keeps a push, in memory and in the journal, until it is decided upon."""
        gradients = self.values.decoded(raw)
        bad = self.values.problem(gradients)
        raw = on_host(raw)
        about = {"rank": rank, "incarnation": incarnation, "sequence": push.sequence, "count": push.count}
        about["untouched"] = push.untouched
        with self._begun(60.0) as journal:
            if not (rank in self.ledger.members and self.ledger.is_known(rank, incarnation, push.sequence)):
                if bad:
                    raise NotDone(f"client {rank}: {bad}")
                journal.append(about, raw)
                self._hold(about, raw, gradients)
            return Taken(self.ledger.version, 0, 1.0)

    def ordered(self, order: Order) -> Done:
        """Does what the first server says, once."""
        with self._changed:
            if isinstance(order, Begin):
                self._begin(order)
            elif isinstance(order, Finish):
                self.finished.set()
            elif not self._line:
                return Done(-1, [])
            elif isinstance(order, Sum):
                return Done(self.ledger.version, self._sum(order))
            elif isinstance(order, Apply):
                self._apply(order)
            else:
                self._keep(order)
            self._changed.notify_all()
            return Done(self.ledger.version, [])

    def end_well(self) -> None:
        """Does nothing: the first server has said when to write a checkpoint."""

    def close(self) -> None:
        """Ends it; an order that is under way is completed first."""
        with self._changed:
            if self._journal is not None:
                self._journal.close()
                self._journal = None
            self._line = ""
            self.values.close()

    @contextmanager
    def _begun(self, seconds: float) -> Iterator[Journal]:
        """Gives, inside the context and alone, the journal, once the first server has begun."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._line, seconds) or self._journal is None:
                raise NotDone(f"the first server has not come in {seconds:g} s", late=True)
            if self.broken is not None:
                raise NotDone(f"the server has failed: {type(self.broken).__name__}: {self.broken}")
            yield self._journal

    def _hold(self, about: dict[str, Any], raw: list[Tensor], gradients: list[Tensor]) -> None:
        key = about["rank"], about["incarnation"], about["sequence"]
        self.ledger.join(key[0], key[1], 0)
        self.ledger.members[key[0]].sequence = key[2]
        gradient = Gradient(*key, 0, frozenset(about["untouched"]), gradients, about["count"])
        self._held[key] = about, raw, gradient

    def _begin(self, order: Begin) -> None:
        """Goes on with what is here of a line; or begins it, where the first server begins it too."""
        if self._line == order.line:
            return
        if self._last().get("line") == order.line:
            self._recall()
            return
        if not order.fresh:
            raise NotDone(
                f"nothing of this run is in {self._directory}, where gradients were kept that no checkpoint has. Bring "
                f"that back; or remove {self._directory.parent}, and go on from the newest checkpoint without them"
            )
        if order.source:
            self.values.resume(Path(order.source))
        self.ledger, self._rows, self._held = Ledger(Async()), {}, {}
        self.ledger.version = order.version
        self._line = order.line
        if self._directory.exists():
            shutil.rmtree(self._directory)
        self._write(0)

    def _sum(self, order: Sum) -> list[list[float]]:
        """Returns the squared norm of the mean of gradients, as an exact sum (see chunks.exact), also of an update that
        is made."""
        if order.version not in self._rows:
            self._check(order.version)
            self.values.mean(Update(self._of(order.pushes), 1.0))
            self._summed = order.version
            row = self.values.squares().tolist()
            self._rows[order.version] = [[digit, value] for digit, value in enumerate(row) if value]
        return self._rows[order.version]

    def _apply(self, order: Apply) -> None:
        if order.version <= self.ledger.version:
            return
        self._check(order.version)
        gradients = self._of(order.pushes)
        if any(len(each) != 3 for each in order.dropped):
            raise NotDone("a dropped push without a rank, an incarnation and a number")
        assert self._journal is not None
        self._journal.append({"apply": asdict(order), "row": self._rows.get(order.version)})
        try:
            self._make(order, gradients)
        except Exception as error:
            self.broken = error
            raise

    def _make(self, order: Apply, gradients: list[Gradient]) -> None:
        update = Update(gradients, order.weight)
        if self._summed != order.version:
            self.values.mean(update)
        self.values.apply(update, torch.tensor(order.factor, dtype=torch.float64))
        self.ledger.version = order.version
        for rank, incarnation, sequence in (*order.pushes, *order.dropped):
            self._held.pop((rank, incarnation, sequence), None)

    def _check(self, version: int) -> None:
        if version != self.ledger.version + 1:
            raise NotDone(
                f"update {version} after update {self.ledger.version}: something was lost from {self._directory}"
            )

    def _of(self, pushes: Sequence[Sequence[Any]]) -> list[Gradient]:
        try:
            return [self._held[rank, incarnation, sequence][2] for rank, incarnation, sequence in pushes]
        except KeyError as error:
            raise NotDone(f"the gradient {error} is not here: something was lost from {self._directory}") from None

    def _keep(self, order: Keep) -> None:
        """Writes a checkpoint of the version that the first server has, too."""
        last = self._last()
        if (last.get("line"), last.get("version")) == (self._line, order.version):
            return
        if order.version != self.ledger.version:
            raise NotDone(f"a checkpoint of update {order.version} is wanted after update {self.ledger.version}")
        for rank, incarnation, sequence in order.decided:
            for key in [key for key in self._held if key[0] == rank]:
                if key[1] != incarnation or key[2] <= sequence:
                    del self._held[key]
        self._rows = {version: row for version, row in self._rows.items() if version > order.since}
        self._write(order.version)

    def _write(self, version: int) -> None:
        """Writes a checkpoint, and before it the journal that follows it, with what is held."""
        old, name = self._journal, secrets.token_hex(4)
        journal = Journal(self._directory / f"journal-{self.ledger.version:08d}-{name}", self._durable)
        try:
            for about, raw, _ in self._held.values():
                journal.append(about, raw)
            rows = {str(number): row for number, row in self._rows.items()}
            state = {**self.ledger.state(), "line": self._line, "journal": name, "rows": rows}
            self.values.save_part(self._directory, {"server": state})
        except BaseException:
            journal.close()
            journal.path.unlink()
            raise
        self._journal = journal
        if old is not None:
            old.close()
        for each in self._directory.glob("journal-*"):
            if each != journal.path:
                each.unlink()

    def _last(self) -> dict[str, Any]:
        """Returns the accounts of the newest checkpoint here; empty where there is none that can be read."""
        try:
            found = completed(self._directory)
            return dict(read_manifest(found[0][1]).extra["user"]["server"]) if found else {}
        except (CheckpointError, KeyError, TypeError):
            return {}

    def _recall(self) -> None:
        """Goes on from the newest checkpoint here, and what the journal has beside it."""
        state = self.values.load(self._directory)["server"]
        self.ledger.restore(state)
        self._rows = {int(number): row for number, row in state["rows"].items()}
        self._held = {}
        version, name = state["version"], state["journal"]
        self._journal = Journal(self._directory / f"journal-{version:08d}-{name}", self._durable)
        for about, raw in self._journal.entries():
            if "apply" in about:
                order = Apply(**about["apply"])
                if about["row"] is not None:
                    self._rows[order.version] = about["row"]
                self._make(order, self._of(order.pushes))
            else:
                self._hold(about, raw, self.values.decoded(raw))
        self._line = state["line"]

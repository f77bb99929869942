"""A part of a parameter server, its weights or a table: values that a policy updates, with accounts and a journal."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from shoal.checkpoint.directory import clean, completed
from shoal.errors import ShoalError
from shoal.server.journal import Journal
from shoal.server.ledger import Gradient, Ledger, Update
from shoal.server.messages import Push, Taken
from shoal.server.policies import Policy
from shoal.server.sessions import Form

_LOOK_SECONDS = 0.2  # between looks whether a client that was lost is no longer waited for


class NotDone(ShoalError):
    """What a client asked for cannot be done; `late`: others have not come in time."""

    def __init__(self, why: str, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Holding(Protocol):
    """Values that clients pull and push gradients of."""

    def room(self, forms: Sequence[Form]) -> list[Tensor]: ...
    def decoded(self, raw: Sequence[Tensor]) -> list[Tensor]: ...
    def problem(self, gradients: Sequence[Tensor]) -> str: ...
    def update(self, update: Update) -> None: ...
    def asked(self, forms: Sequence[Form]) -> list[Tensor]: ...
    def wrong(self, asked: Sequence[Tensor]) -> str: ...
    def read(self, asked: Sequence[Tensor], into: list[Tensor]) -> list[Tensor]: ...
    def save(self, directory: Path, extra: Mapping[str, Any]) -> None: ...
    def load(self, directory: Path) -> dict[str, Any]: ...
    def to_json(self) -> dict[str, object]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Keeping:
    """How a part is kept.

    directory: of its checkpoints and journal; None keeps nothing.
    save_every: updates from one checkpoint to the next.
    durable: an acknowledged push also survives the host (see journal).
    grace: seconds for which a lost client is still waited for, so that it can come again.
    """

    directory: Path | None
    save_every: int
    durable: bool
    grace: float

    def of(self, part: str) -> Keeping:
        """Returns how the part of this name is kept."""
        inside = None if self.directory is None else self.directory / (part or "weights")
        return Keeping(inside, self.save_every, self.durable, self.grace)


class Part:
    """Holds `values` under `policy`, kept as `keeping` says; it goes on from what it finds there. Its methods may be
    called from any thread."""

    def __init__(self, values: Holding, policy: Policy, keeping: Keeping) -> None:
        self.values, self._keeping = values, keeping
        self.ledger = Ledger(policy)
        self._policy = policy
        self._changed = threading.Condition()
        self._present: set[int] = set()
        self._gone: dict[int, float] = {}
        self._journal: Journal | None = None
        if keeping.directory is not None:
            self._go_on(keeping.directory)

    def join(self, rank: int, incarnation: str) -> None:
        """Opens the account of a client that has come."""
        with self._changed:
            self._present.add(rank)
            member = self.ledger.members.get(rank)
            if member is None or member.incarnation != incarnation:
                clock = self.ledger.clock_for(rank, self._active())
                if self._journal is not None:
                    self._journal.append({"rank": rank, "incarnation": incarnation, "clock": clock})
                self.ledger.join(rank, incarnation, clock)
            self._changed.notify_all()

    def leave(self, rank: int, lost: bool) -> None:
        """Notes that a client has gone; one that was lost is waited for a little longer."""
        with self._changed:
            self._present.discard(rank)
            self._gone[rank] = time.monotonic() if lost else -self._keeping.grace
            self._changed.notify_all()

    def pull(self, rank: int, asked: Sequence[Tensor], seconds: float, into: list[Tensor]) -> tuple[int, list[Tensor]]:
        """Returns version and values once the policy gives them. Raises NotDone where that takes longer than
        `seconds`."""
        until = time.monotonic() + seconds
        if why := self.values.wrong(asked):
            raise NotDone(f"client {rank} asks for {why}")
        with self._changed:
            while True:
                active = self._active()
                waits, whom = self._policy.awaited(rank, self.ledger.members, active, self.ledger.version)
                if not waits:
                    break
                left = until - time.monotonic()
                if left <= 0:
                    names = ", ".join(map(str, whom)) or "more clients"
                    raise NotDone(f"client {rank} has waited {seconds:g} s for client {names}", late=True)
                self._changed.wait(min(left, _LOOK_SECONDS))
            self.ledger.pulled(rank, active)
            return self.ledger.version, self.values.read(asked, into)

    def push(self, rank: int, incarnation: str, push: Push, raw: list[Tensor]) -> Taken:
        """Enters a push in the journal and the accounts, and makes the update that it completes. Raises NotDone for one
        that cannot be taken."""
        gradients = self.values.decoded(raw)
        bad = self.values.problem(gradients)
        gradient = Gradient(rank, incarnation, push.sequence, push.version, frozenset(push.untouched), gradients)
        with self._changed:
            if self.ledger.is_known(rank, incarnation, push.sequence):
                return Taken(self.ledger.version, 0, 1.0)
            if bad := bad or self.ledger.problem(gradient):
                raise NotDone(f"client {rank}: {bad}")
            if self._journal is not None:
                about = {"rank": rank, "sequence": push.sequence, "version": push.version, "untouched": push.untouched}
                self._journal.append(about, raw)
            taken = self._take(gradient)
            self._changed.notify_all()
        return taken

    def save(self) -> None:
        """Writes a checkpoint and begins a new journal. No gradient may be pending."""
        directory, old = self._keeping.directory, self._journal
        assert directory is not None
        self.values.save(directory, {"server": self.ledger.state()})
        self._journal = Journal(_journal_path(directory, self.ledger.version), self._keeping.durable)
        if old is not None and old.path != self._journal.path:
            old.close()
            old.path.unlink()

    def close(self) -> None:
        """Ends it; a push that is under way is completed first."""
        with self._changed:
            if self._journal is not None:
                self._journal.close()
                self._journal = None
            self.values.close()

    def _take(self, gradient: Gradient) -> Taken:
        outcome = self.ledger.take(gradient)
        if outcome.update is not None:
            self.values.update(outcome.update)
            if self._journal is not None and self.ledger.version % self._keeping.save_every == 0:
                self.save()
        return Taken(self.ledger.version, outcome.lag, outcome.weight)

    def _active(self) -> set[int]:
        """Returns the clients that are here, or were until a moment ago."""
        now = time.monotonic()
        recent = {rank for rank, since in self._gone.items() if now - since < self._keeping.grace}
        return (self._present | recent) & self.ledger.members.keys()

    def _go_on(self, directory: Path) -> None:
        """Goes on from the newest checkpoint and what the journal has beside it; or writes the first checkpoint."""
        clean(directory)
        if not completed(directory):
            self.save()
            return
        self.ledger.restore(self.values.load(directory)["server"])
        journal = Journal(_journal_path(directory, self.ledger.version), self._keeping.durable)
        for about, raw in journal.entries():
            self._replay(about, raw)
        self._journal = journal
        self._gone = dict.fromkeys(self.ledger.members, time.monotonic())

    def _replay(self, about: dict[str, Any], raw: list[Tensor]) -> None:
        rank = about["rank"]
        if "clock" in about:
            self.ledger.join(rank, about["incarnation"], about["clock"])
            return
        untouched, incarnation = frozenset(about["untouched"]), self.ledger.members[rank].incarnation
        tensors = self.values.decoded(raw)
        self._take(Gradient(rank, incarnation, about["sequence"], about["version"], untouched, tensors))


def _journal_path(directory: Path, version: int) -> Path:
    return directory / f"journal-{version:08d}"

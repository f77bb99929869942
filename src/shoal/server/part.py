"""A part of a parameter server, its weights or a table: values that a policy updates, with accounts and a journal."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.directory import clean, completed
from shoal.errors import CheckpointError, StorageError, UserError
from shoal.server.holding import Holding
from shoal.server.journal import Journal, on_host
from shoal.server.keeping import Dealt, Keeping, NotDone
from shoal.server.ledger import Gradient, Ledger
from shoal.server.messages import WAIT, Push, Taken, Work
from shoal.server.policies import Policy

_LOOK_SECONDS = 0.2  # between looks whether a client that was lost is no longer waited for


class Part:
    """Holds `values` under `policy`, kept as `keeping` says; it goes on from what it finds there. Its methods may be
    called from any thread. `dealt`: where it belongs to a job."""

    def __init__(self, values: Holding, policy: Policy, keeping: Keeping, dealt: Dealt | None = None) -> None:
        self.values, self._keeping, self._dealt = values, keeping, dealt
        self.ledger = Ledger(policy)
        self._policy = policy
        self._changed = threading.Condition()
        self._present: set[int] = set()
        self._idle: set[int] = set()
        self._gone: dict[int, float] = {}
        self._journal: Journal | None = None
        self.broken: Exception | None = None
        """What has kept a push that is in the journal from its update: nothing here can be relied on any more."""
        if keeping.directory is not None:
            self._go_on(keeping.directory)

    def join(self, rank: int, incarnation: str) -> None:
        """Opens the account of a client that has come."""
        with self._changed:
            self._present.add(rank)
            member = self.ledger.members.get(rank)
            if member is None or member.incarnation != incarnation:
                if self._dealt is not None:
                    self._dealt.tickets.forget(rank)
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

    def pull(
        self, rank: int, asked: Sequence[Tensor], seconds: float, into: list[Tensor], device: torch.device
    ) -> tuple[int, list[Tensor]]:
        """Returns version and values once the policy gives them. Raises NotDone where that takes longer than `seconds`.

        into, device: see Holding.
        """
        until = time.monotonic() + seconds
        if why := self.values.wrong(asked):
            raise NotDone(f"client {rank} asks for {why}")
        gated = self._dealt is not None and self._policy.ordered  # by its tickets
        with self._changed:
            while True:
                active = self._active() - self._idle
                waits, whom = self._policy.awaited(rank, self.ledger.members, active, self.ledger.version)
                if not waits or gated:
                    break
                left = until - time.monotonic()
                if left <= 0:
                    others = f"client {', '.join(map(str, whom))}" if whom else "more clients"
                    remedy = "see whether they run, or give connect a longer timeout"
                    raise NotDone(f"client {rank} has waited {seconds:g} s for {others}: {remedy}", late=True)
                self._changed.wait(min(left, _LOOK_SECONDS))
            self.ledger.pulled(rank, active)
            return self.ledger.version, self.values.read(asked, into, device)

    def read(self, values: Callable[[], list[Tensor]], seconds: float) -> tuple[int, list[Tensor]]:
        """Returns the version, and what `values` gives, between two updates."""
        with self._changed:
            return self.ledger.version, values()

    def push(self, rank: int, incarnation: str, push: Push, raw: list[Tensor]) -> Taken:
        """Enters a push in the journal and the accounts, and makes the update that it completes. Raises NotDone for one
        that cannot be taken."""
        gradients = self.values.decoded(raw)
        bad = self.values.problem(gradients)
        raw = raw if self._keeping.directory is None else on_host(raw)
        about = {"rank": rank, "sequence": push.sequence, "version": push.version, "untouched": push.untouched}
        about |= {"count": push.count, "ticket": push.ticket, "note": push.note}
        gradient = _gradient(about, incarnation, gradients)
        with self._changed:
            if self.ledger.is_known(rank, incarnation, push.sequence):
                return Taken(self.ledger.version, 0, 1.0)
            if bad := bad or self._problem(gradient):
                raise NotDone(f"client {rank}: {bad}")
            if self.broken is not None:
                raise NotDone(f"the server has failed: {type(self.broken).__name__}: {self.broken}")
            try:
                return self._enter(gradient, about, raw)
            except Exception as error:
                if self._dealt is not None or not isinstance(error, StorageError):  # of which nothing was entered
                    self.broken = error
                raise

    def deal(self, rank: int, seconds: float, found: Mapping[str, Any]) -> Work:
        """Returns what client `rank` is to do, once there is something; WAIT after `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            if self._dealt is None:
                raise NotDone("this server deals no work: it belongs to no job")
            tickets = self._dealt.tickets
            if found and tickets.evaluated(rank, int(found["step"])):
                self._dealt.watch.evaluated(self.ledger.version, found)
                self._changed.notify_all()
            self._idle.add(rank)  # nobody waits for one that has nothing to do
            try:
                while True:
                    work = tickets.next(rank, self.ledger.version, self._active())
                    left = until - time.monotonic()
                    if work.what != WAIT or left <= 0:
                        return work
                    self._changed.wait(min(left, _LOOK_SECONDS))
            finally:
                self._idle.discard(rank)

    def end(self, evaluate: bool) -> None:
        """Deals no further steps of a job; see Tickets.end."""
        with self._changed:
            assert self._dealt is not None
            self._dealt.tickets.end(evaluate)
            self._changed.notify_all()

    def is_over(self) -> bool:
        """Returns whether nothing is left to do of a job."""
        with self._changed:
            return self._dealt is not None and self._dealt.tickets.is_over(self._active())

    def save_last(self) -> bool:
        """Writes a checkpoint of the newest update, where the last one is older; returns False where gradients wait for
        others: the journal has those. Raises CheckpointError."""
        with self._changed:
            if not self.ledger.pending and self._journal is not None and self._journal.has_pushes:
                self.save()
            return not self.ledger.pending

    def end_well(self) -> None:
        """Writes a last checkpoint where this belongs to no job, so that any number of servers can go on from it."""
        if self._dealt is None and self.broken is None:
            self.save_last()

    def save(self) -> None:
        """Writes a checkpoint and begins a new journal. No gradient may be pending."""
        directory, old, name = self._keeping.directory, self._journal, secrets.token_hex(4)
        assert directory is not None
        more = {} if self._dealt is None else {"tickets": self._dealt.tickets.state()}
        if (sharing := self._keeping.sharing) is not None:
            more.update(sharing.told)
        began = time.perf_counter()
        self.values.save(directory, {"server": {**self.ledger.state(), **more, "journal": name}})
        self._journal = Journal(self._keeping.journal(self.ledger.version, name), self._keeping.durable)
        if old is not None:
            old.close()
        for each in self._journal.path.parent.glob("journal-*"):
            if each != self._journal.path:
                each.unlink()
        if sharing is not None:
            sharing.publish(self.ledger.version)
        if self._dealt is not None:
            self._dealt.watch.saved(self.ledger.version, time.perf_counter() - began)

    def close(self) -> None:
        """Ends it; a push that is under way is completed first."""
        with self._changed:
            if self._journal is not None:
                self._journal.close()
                self._journal = None
            self.values.close()

    def _enter(self, push: Gradient, about: dict[str, Any], raw: list[Tensor]) -> Taken:
        skips = self._dealt is not None and self._dealt.tickets.is_done(push.ticket)
        if self._journal is not None:
            self._journal.append({**about, "skips": skips}, () if skips else raw)
        taken = self._skip(push) if skips else self._take(push)
        self._changed.notify_all()
        return taken

    def _problem(self, push: Gradient) -> str:
        """Returns why a push cannot be taken, or ""."""
        if not (math.isfinite(push.count) and push.count >= 0):
            return f"a gradient that counts {push.count}"
        return self.ledger.problem(push) or ("" if self._dealt is None else self._dealt.tickets.problem(push.ticket))

    def _take(self, push: Gradient) -> Taken:
        outcome = self.ledger.take(push)
        if not outcome.weight:
            self.values.dropped(push)
        if outcome.update is not None:
            self.values.update(outcome.update)
        if self._dealt is not None:
            self._dealt.tickets.take(push.ticket, used=outcome.weight > 0)
            self._dealt.watch.pushed(push, outcome)
            if outcome.update is not None:
                self._dealt.tickets.updated(self.ledger.version)
        if outcome.update is not None and self._journal is not None and self._is_due(self._journal):
            self._save_or_tell()
        return Taken(self.ledger.version, outcome.lag, outcome.weight)

    def _skip(self, push: Gradient) -> Taken:
        """Enters a push of a ticket that is done already."""
        self.ledger.skip(push.rank, push.sequence)
        self.values.dropped(push)
        return Taken(self.ledger.version, self.ledger.version - push.version, 0.0)

    def _is_due(self, journal: Journal) -> bool:
        return self.ledger.version % self._keeping.save_every == 0 or journal.nbytes > self._keeping.most_bytes

    def _save_or_tell(self) -> None:
        """Saves. In a job a failure is told, and the journal goes on: the next one may succeed."""
        try:
            self.save()
        except CheckpointError as error:
            if self._dealt is None:
                raise
            self._dealt.watch.failed(error)

    def _active(self) -> set[int]:
        """Returns the clients that are here, or were until a moment ago."""
        now = time.monotonic()
        recent = {rank for rank, since in self._gone.items() if now - since < self._keeping.grace}
        return (self._present | recent) & self.ledger.members.keys()

    def _go_on(self, directory: Path) -> None:
        """Goes on from the newest checkpoint and what the journal has beside it; or writes the first checkpoint."""
        clean(directory)
        dealt, extra = self._dealt, dict[str, Any]()
        if dealt is not None:
            extra.update(dealt.restored)
        elif self._keeping.sharing is not None and (others := self._keeping.sharing.others()):
            self.ledger.restore(self.values.load_parts(others)["server"])
            self.save()
            return
        elif completed(directory):
            extra = self.values.load(directory)
        state = extra.get("server")
        if state is None:
            if dealt is not None:
                self.ledger.version = dealt.step
                dealt.tickets.begin(dealt.step)
            self.save()
            return
        self.ledger.restore(state)
        journal = Journal(self._keeping.journal(self.ledger.version, state["journal"]), self._keeping.durable)

        def fresh() -> bool:
            return not any(raw for _, raw in journal.entries())

        if dealt is not None and not dealt.tickets.restore(state["tickets"], self.ledger.version, fresh):
            raise UserError(
                f"the run was cut short in a step of {state['tickets']['shares']} shares: go on with the workers and "
                "the server.policy that it had; a run that has ended, also by SIGTERM, goes on with others"
            )
        for about, raw in journal.entries():
            self._replay(about, raw)
        self._journal = journal
        self._gone = dict.fromkeys(self.ledger.members, time.monotonic())

    def _replay(self, about: dict[str, Any], raw: list[Tensor]) -> None:
        rank = about["rank"]
        if "clock" in about:
            self.ledger.join(rank, about["incarnation"], about["clock"])
            return
        incarnation = self.ledger.members[rank].incarnation
        if about["skips"]:
            self._skip(_gradient(about, incarnation, []))
        else:
            self._take(_gradient(about, incarnation, self.values.decoded(raw)))


def _gradient(about: Mapping[str, Any], incarnation: str, tensors: list[Tensor]) -> Gradient:
    """Returns what a journal's entry, or a push, describes."""
    untouched, work = frozenset(about["untouched"]), (about["count"], about["ticket"], about["note"])
    return Gradient(about["rank"], incarnation, about["sequence"], about["version"], untouched, tensors, *work)

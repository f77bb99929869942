"""Reports when a call of a group waits unusually long, for which ranks, and when it goes on.

It never ends the wait: the other rank may have a reason. A thread of each rank checks its calls twice a second. For a
collective that has lasted a second the rank signs at the group's store; after STALL_SECONDS those who have not signed
are missing, and the first rank that is there speaks for all.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist

from shoal.comm.unanswered import ask

STALL_SECONDS = 5.0
SIGN_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_STORE_SECONDS = 2.0  # the most that the store may take; its server may be what has stopped

Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Writes the line at once, so that lines of several ranks do not mix."""
    with suppress(OSError, ValueError):  # closed: nobody listens
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


@dataclass(eq=False, slots=True)
class Call:
    """A call under way.

    - `what`: operation and purpose
    - `number`: number of a collective; None for a message
    - `peer`: the other rank of a message
    """

    what: str
    number: int | None
    peer: int | None = None
    started: float = field(default_factory=time.monotonic)
    signed: bool = False
    said: bool = False
    failed: bool = False


class Calls:
    """The calls under way in one group, by thread. Their threads call `begin` and `end`, `Stalls` the rest."""

    def __init__(self, group: str, rank: int, ranks: list[int], store: dist.Store | None) -> None:
        self.group, self.rank, self.ranks, self.store = group, rank, ranks, store
        self.open: dict[int, Call] = {}
        self.said: list[Call] = []
        self.longest: dict[str, float] = {}  # waits for messages: a pipeline may be slow, and that is said once

    def begin(self, what: str, number: int, peer: int | None) -> Call:
        """Notes the start of a call.

        `number`: of the last collective; `peer`: the other rank of a message, else None.
        """
        call = self.open[threading.get_ident()] = Call(what, number if peer is None else None, peer)
        return call

    def end(self) -> None:
        del self.open[threading.get_ident()]

    def forgive(self, seconds: float) -> None:
        """Discounts `seconds` in which this process itself stood still: it has not waited for others meanwhile."""
        for call in list(self.open.values()):
            call.started += seconds

    def longest_open(self) -> tuple[float, str] | None:
        """Returns when the call that has lasted longest began (time.monotonic), and its name."""
        first = min(list(self.open.values()), key=lambda call: call.started, default=None)
        return None if first is None else (first.started, self._name(first))

    def look(self, say: Say) -> None:
        """Reports calls that wait too long, and those reported before that go on."""
        now = time.monotonic()
        waiting = list(self.open.values())
        for call in [call for call in self.said if call not in waiting]:
            self.said.remove(call)
            if not call.failed:
                say(f"shoal: rank {self.ranks[self.rank]}: {self._name(call)} goes on after {now - call.started:.0f} s")
        for call in waiting:
            lasted = now - call.started
            if lasted > SIGN_SECONDS and call.number is not None and not call.signed:
                call.signed = True
                self._ask(partial(_sign, f"waits/{call.number}/{self.rank}"))
            if call.said or lasted < max(STALL_SECONDS, 2 * self.longest.get(call.what, 0.0)):
                continue
            call.said = True
            missing = self._missing(call)
            if missing is None or (missing and self.rank == min(set(range(len(self.ranks))) - set(missing))):
                names = ", ".join(str(self.ranks[rank]) for rank in missing or [])
                whom = f"rank {names}" if missing else "others (the store does not answer)"
                say(f"shoal: rank {self.ranks[self.rank]} has waited {lasted:.0f} s in {self._name(call)}, for {whom}")
                self.said.append(call)
                if call.number is None:
                    self.longest[call.what] = lasted

    def _name(self, call: Call) -> str:
        where = f"group {self.group}"
        return f"{call.what}, " + (where if call.number is None else f"collective {call.number} of {where}")

    def _missing(self, call: Call) -> list[int] | None:
        """Returns the ranks in the group that have not come, or None if that cannot be found out."""
        if call.number is None:
            return [] if call.peer is None else [call.peer]
        answers: list[list[int]] = []

        def roll(store: dist.Store) -> None:
            others = (rank for rank in range(len(self.ranks)) if rank != self.rank)
            answers.append([rank for rank in others if not store.check([f"waits/{call.number}/{rank}"])])

        self._ask(roll)
        return answers[0] if answers else None

    def _ask(self, question: Callable[[dist.Store], object]) -> None:
        """Asks the store, where there is one; what it does not answer soon is not known."""
        if self.store is not None:
            ask(partial(question, self.store), _STORE_SECONDS)


def _sign(key: str, store: dist.Store) -> None:
    store.set(key, "1")


class Stalls:
    """Watches the calls of all groups of a rank. `say` gets each line."""

    def __init__(self, say: Say = to_stderr) -> None:
        self._say = say
        self._calls: list[Calls] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, group: str, rank: int, ranks: list[int], store: dist.Store | None) -> Calls:
        """Returns the record of a group's calls, which is watched from now on."""
        calls = Calls(group, rank, ranks, store)
        self._calls.append(calls)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="shoal-stalls", daemon=True)
            self._thread.start()
        return calls

    def longest_open(self) -> tuple[float, str] | None:
        """Returns when the call that has lasted longest in any group began (time.monotonic), and its name."""
        return min(filter(None, (calls.longest_open() for calls in list(self._calls))), default=None)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LOOK_SECONDS)

    def _look(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(_LOOK_SECONDS):
            lost = time.monotonic() - before - _LOOK_SECONDS
            for calls in list(self._calls):
                if lost > SIGN_SECONDS:
                    calls.forgive(lost)
                calls.look(self._say)
            before = time.monotonic()

"""Who trains on which samples: a run's steps in shares, each dealt to one client, and again where that is lost.

Share i of step s has the ticket s * shares + i. It is done once a gradient of it was taken; one that the policy has
dropped is dealt again. So as many tickets are done as the updates were made of, whoever came and went.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

from shoal.server.messages import END, EVALUATE, TRAIN, WAIT, Work


class Tickets:
    """Deals the tickets of `total` steps, None for no end; computes nothing and waits for nobody.

    shares: of a step.
    gated: a step is dealt once the weights are those of the step before.
    eval_every: updates from one evaluation to the next, 0 for none but the last; None for none.
    rests: no step is dealt while an evaluation is due, which so sees the weights of one step though it reads them
        little by little.
    seen: the newest version that an earlier server of the run had evaluated, -1 for none.
    """

    def __init__(
        self, total: int | None, shares: int, gated: bool, eval_every: int | None, rests: bool = False, seen: int = -1
    ) -> None:
        self._total, self.shares, self._gated, self._every = total, shares, gated, eval_every
        self._rests, self._seen = rests, seen
        self._below = 0
        self._beyond: set[int] = set()
        self._out: dict[int, int] = {}
        self._ends = self._last = False
        self._due, self._wanted = eval_every is not None, 0
        self._evaluates: int | None = None

    @property
    def done(self) -> int:
        """The number of tickets that are done."""
        return self._below + len(self._beyond)

    def is_done(self, ticket: int) -> bool:
        return ticket < self._below or ticket in self._beyond

    def problem(self, ticket: int) -> str:
        """Returns why there is no such ticket, or ""."""
        last = None if self._total is None else self._total * self.shares
        return f"ticket {ticket}, which was never dealt" if ticket < 0 or (last is not None and ticket >= last) else ""

    def holds(self, active: Set[int]) -> bool:
        """Returns whether one of the `active` clients is at work on a ticket."""
        return any(rank in active for rank in self._out.values())

    def next(self, rank: int, version: int, active: Set[int]) -> Work:
        """Returns what client `rank` does now: what it has already, where its answer was lost."""
        held = [ticket for ticket, holder in self._out.items() if holder == rank]
        ticket = held[0] if held else None
        if ticket is None and self._due and (self._evaluates in (None, rank) or self._evaluates not in active):
            self._evaluates = rank
            return Work(EVALUATE, 0)
        if ticket is None and not (self._rests and self._due):
            ticket = self._first(version, active)
        if ticket is not None:
            self._out[ticket] = rank
            return Work(TRAIN, ticket)
        if self._last and not self.holds(active):
            self._last, self._due, self._evaluates = False, True, rank
            return Work(EVALUATE, 0)
        return Work(END if self.is_over(active) else WAIT, 0)

    def is_over(self, active: Set[int]) -> bool:
        """Returns whether nothing is left to do."""
        if self._due or self._last:
            return False
        if self._total is not None and self.done >= self._total * self.shares:
            return True
        return self._ends and not self.holds(active) and (self.done % self.shares == 0 or not active)

    def take(self, ticket: int, used: bool) -> None:
        """Notes that a gradient of a ticket was taken, and whether it was `used`."""
        self._out.pop(ticket, None)
        if used:
            self._beyond.add(ticket)
            while self._below in self._beyond:
                self._beyond.remove(self._below)
                self._below += 1

    def updated(self, version: int) -> None:
        """Notes an update."""
        if self._every is None or self._ends or version <= self._seen:
            return
        if version in (0, self._total) or (self._every > 0 and version % self._every == 0):
            self._due, self._wanted = True, version

    def evaluated(self, rank: int, version: int) -> bool:
        """Notes that a client brings an evaluation of the weights of `version`; returns whether it was the one to make
        it. Where later weights are due by now, they still are."""
        mine = self._due and self._evaluates == rank
        if mine:
            self._due, self._evaluates = version < self._wanted, None
        return mine

    def forget(self, rank: int) -> None:
        """Takes back what a client had, of which another process has come."""
        self._out = {ticket: holder for ticket, holder in self._out.items() if holder != rank}
        self._evaluates = None if self._evaluates == rank else self._evaluates

    def end(self, evaluate: bool) -> None:
        """Deals no further steps; those that are begun are completed, and `evaluate` says whether what they have come
        to is evaluated."""
        self._ends, self._last, self._due = True, evaluate and self._every is not None, False

    def state(self) -> dict[str, Any]:
        """Returns the accounts as JSON."""
        return {"shares": self.shares, "below": self._below, "beyond": sorted(self._beyond)}

    def restore(self, state: dict[str, Any], version: int, fresh: Callable[[], bool]) -> bool:
        """Goes on from what `state` gave. Returns False where that had other shares, some of which are done; `fresh()`:
        whether nothing has been pushed since."""
        if state["shares"] == self.shares:
            self._below, self._beyond = state["below"], set(state["beyond"])
        elif state["beyond"] or not fresh():
            return False
        else:
            self._below = version * self.shares
        self._due = False
        self.updated(version)  # a server that is lost may have saved an update, and not seen its evaluation
        return True

    def begin(self, step: int) -> None:
        """Goes on with `step`, whose predecessors others have trained."""
        self._below, self._beyond = step * self.shares, set()
        self._due = self._due and step == 0

    def _first(self, version: int, active: Set[int]) -> int | None:
        """Returns the first ticket that nobody is at work on, and that may be dealt now."""
        ticket = self._below
        while self.is_done(ticket) or self._out.get(ticket, -1) in active:
            ticket += 1
        if self.problem(ticket) or (self._gated and ticket // self.shares != version):
            return None
        under_way = sum(holder in active for holder in self._out.values())
        if self._ends and (self.done + under_way) % self.shares == 0:
            return None
        return ticket

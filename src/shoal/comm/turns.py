"""A fair lock: one thread at a time, in the order in which the threads asked."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class Turns:
    """A fair, reentrant lock.

    It is fair because the order of a group's collectives must be the order of the calls on every rank: a plain lock may
    let a later caller in first, on one rank and not on another. It is reentrant because an operation may consist of
    several.
    """

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._guard = threading.Lock()
        self._line: deque[threading.Lock] = deque()  # the first is unlocked: its thread waits for the turn itself

    def ask(self) -> threading.Lock:
        """Joins the queue; returns a ticket that some thread must pass to `take`."""
        ticket = threading.Lock()
        with self._guard:
            if self._line:
                ticket.acquire()
            self._line.append(ticket)
        return ticket

    def take(self, ticket: threading.Lock) -> None:
        """Waits for the turn of a ticket. If a signal's handler interrupts the wait, the ticket is given up."""
        try:
            ticket.acquire()
            self._turn.acquire()
        finally:
            with self._guard:
                first = self._line[0] is ticket
                self._line.remove(ticket)
                if first and self._line:
                    self._line[0].release()

    def leave(self) -> None:
        """Ends the turn of this thread; the next one in the queue has it."""
        self._turn.release()

    def __enter__(self) -> None:
        behind = self._line and not self._turn._is_owned()  # type: ignore[attr-defined]
        if behind or not self._turn.acquire(blocking=False):
            self.take(self.ask())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turn.release()


def in_one_turn(method: Method) -> Method:
    """Decorates a method of several collectives of `self`, so that no other thread's come between them."""

    @wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with self._turns:
            return method(self, *args, **options)

    return cast(Method, run)

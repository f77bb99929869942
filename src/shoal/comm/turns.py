"""Turns: one thread at a time, in the order in which the threads asked."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class Turns:
    """A lock that is fair and that its holder may take again.

    Fair, because the order of a group's collectives must be the order of the calls on every rank: a plain lock may let a later caller in first,
    on one rank and not on another. Taken again, because an operation may consist of several.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[threading.Lock] = deque()
        self._taken = False
        self._owner, self._depth = 0, 0

    def ask(self) -> threading.Lock | None:
        """Takes a place in the line, whose turn `take` awaits, in whatever thread; every place that is asked for must be taken. None: it is its turn."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return None
            place = threading.Lock()
            place.acquire()
            self._line.append(place)
            return place

    def take(self, place: threading.Lock | None) -> None:
        """Returns when it is the turn of `place`. Interrupted, the place is given up."""
        if place is not None:
            try:
                place.acquire()
            except BaseException:  # the handler of a signal raised
                self._give_up(place)
                raise
        self._owner = threading.get_ident()

    def leave(self) -> None:
        """Ends the turn; the next in the line has it."""
        self._owner = 0
        with self._lock:
            if self._line:
                self._line.popleft().release()
            else:
                self._taken = False

    def _give_up(self, place: threading.Lock) -> None:
        with self._lock:
            waiting = place in self._line
            if waiting:
                self._line.remove(place)
        if not waiting:  # its turn had come at that very moment
            self.leave()

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._depth += 1
            return
        self.take(self.ask())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._depth:
            self._depth -= 1
        else:
            self.leave()


def in_one_turn(method: Method) -> Method:
    """For a method that consists of several collectives of `self`, whose turns are `self._turns`: no other thread's come between them."""

    @wraps(method)
    def run(self: Any, *args: Any, **options: Any) -> Any:
        with self._turns:
            return method(self, *args, **options)

    return cast(Method, run)

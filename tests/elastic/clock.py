"""Time for many supervisors in one process, which stands while their event loop stands.

A busy machine may give the loop no core for a second. Then none of its supervisors beats or answers, and by the real
clock all of them would count as silent at once, as nodes on hosts of their own never do.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

TURN = 0.01
"""Seconds that count at most of a turn of the loop, beside those that it waits."""
LIMIT = 40.0
"""Seconds that a test may take."""


class Clock:
    """Follows the `real` clock, but for no more than the seconds that each turn allows."""

    def __init__(self, real: Callable[[], float]) -> None:
        self._real = real
        self._turn = real(), real(), TURN  # the time at its beginning, that of the real clock, what it allows

    def __call__(self) -> float:
        began, real, most = self._turn
        return began + min(self._real() - real, most)

    def turn(self, most: float) -> None:
        """Begins a turn that counts for at most so many seconds."""
        self._turn = self(), self._real(), most


class Selector(selectors.DefaultSelector):
    """Tells a clock when the loop waits, and for how long it would."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._clock.turn(float("inf") if timeout is None else TURN + max(0.0, timeout))
        try:
            return super().select(timeout)
        finally:
            self._clock.turn(TURN)


class Loop(asyncio.SelectorEventLoop):
    """An event loop by a clock that stands while the loop stands."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        super().__init__(Selector(clock))

    def time(self) -> float:
        return self._clock()


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Makes a test of a coroutine, for which all time is that of its loop."""

    @wraps(test)
    def run() -> None:
        async def with_limit() -> None:
            async with asyncio.timeout(LIMIT):
                await test()

        clock, since_1970 = Clock(time.monotonic), time.time() - time.monotonic()
        with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
            patch.setattr(time, "monotonic", clock)
            patch.setattr(time, "time", lambda: since_1970 + clock())
            runner.run(with_limit())

    return run

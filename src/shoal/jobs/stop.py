"""When a run stops: after a signal, or when its time is over. All ranks stop after the same step."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType

import torch
from torch import Tensor

from shoal.comm import Group, Lane
from shoal.comm.lane import Ticket

CHECK_SECONDS = 0.25  # between two questions to the other ranks; one costs about 0.1 ms
MOST_STEPS = 64
_TIME_IS_OVER = 1  # signals have their own numbers, from 2 on: SIGINT is 2, SIGTERM 15


class Stop:
    """Asks all ranks of `group` every quarter of a second whether one of them wants to stop.

    Each rank brings its signal; rank 0 brings the time limit (`seconds` from now, None for none) and says after how many steps
    to ask again, so that all ask at the same step. As a context it takes over the first SIGINT and SIGTERM: the step in progress ends.
    `aside`: ranks are not to wait for each other after a step, so each question is answered when the next one is asked; `group` is then used by nobody else.
    """

    def __init__(self, group: Group, seconds: float | None, aside: bool = False) -> None:
        self._group = group
        self._lane = Lane(torch.device("cpu")) if aside else None
        self._under_way: tuple[Ticket, Tensor] | None = None
        self._started = self._asked = time.monotonic()
        self._seconds = seconds
        self._received = 0
        self._left = self._interval = 1
        self._handlers: dict[int, object] = {}
        self.signal: int | None = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler, and gets no signal
            self._handlers = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._lane is not None and kind is None:  # else others may never answer
            self._lane.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(number, self._handlers[number])  # type: ignore[arg-type]  # the second one ends a step that hangs

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._started

    def after_step(self) -> str | None:
        """To be called by all ranks after each step: why to stop now, or None. The same on every rank."""
        self._left -= 1
        if self._left > 0:
            return None
        wish = self._received
        if self._group.rank == 0 and not wish and self._seconds is not None and self.elapsed >= self._seconds:
            wish = _TIME_IS_OVER
        wish, self._left = self._ask(torch.tensor([wish, self._next_interval()])).tolist()
        self._interval = self._left = max(1, self._left)
        if wish > _TIME_IS_OVER:
            self.signal = wish
            return f"stopped by {signal.Signals(wish).name}"
        return "the time limit was reached" if wish else None

    def _ask(self, wish: Tensor) -> Tensor:
        """The most of all ranks; zeros where that is not known yet."""

        def ask() -> None:
            self._group.all_reduce(wish, op="max", purpose="stop?")

        if self._lane is None:
            ask()
            return wish
        before, self._under_way = self._under_way, (self._lane.submit(ask, "stop?"), wish)
        if before is None:
            return torch.zeros_like(wish)
        ticket, answer = before
        ticket.wait("stop?")
        return answer

    def _next_interval(self) -> int:
        """On rank 0, the number of steps that take CHECK_SECONDS at the last pace; 0 elsewhere."""
        now = time.monotonic()
        pace, self._asked = (now - self._asked) / self._interval, now
        return min(MOST_STEPS, max(1, int(CHECK_SECONDS / max(pace, 1e-9)))) if self._group.rank == 0 else 0

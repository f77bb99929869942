"""Stops a run after a signal or at its time limit. All ranks stop after the same step."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

import torch
from torch import Tensor

from shoal.comm import Group, Lane
from shoal.comm.lane import Ticket
from shoal.elastic.events import END, HALT, INTERRUPT, NOW, SAVE
from shoal.errors import LaunchError

CHECK_SECONDS = 0.25  # between two all-reduces of the stop flag; one costs about 0.1 ms
MOST_STEPS = 64
STOPPED = "stopped by "
"""How the reason of a run begins that a signal ended."""
_TIME_IS_OVER = 1  # signals have their own numbers, from 2 on: SIGINT is 2, SIGTERM 15
_WISHES = {END: int(signal.SIGTERM), INTERRUPT: int(signal.SIGINT), HALT: 100, SAVE: 101}


class Halted(Exception):
    """All ranks leave their generation after the same step, to go on in another one. `how`: HALT or SAVE."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Stop:
    """Reduces a stop flag over the ranks of `group` about every quarter of a second.

    Each rank contributes the signal it received. Rank 0 contributes the time limit, and the number of steps until the
    next reduction, so that all ranks reduce after the same step. As a context manager it handles SIGINT and
    SIGTERM, so that the step in progress is completed. A second SIGINT has its usual effect; a second SIGTERM changes
    nothing, since Slurm sends two in a row when it preempts a job, and every scheduler ends what hangs by SIGKILL.

    seconds: time limit from now, None for none.
    asked: on rank 0, whether something else is wanted of the ranks between steps (see `wanted`).
    heeds: whether a signal that reaches this process ends the run. Where a supervisor says what becomes of it (see
        `ask`) none does: one may have reached all processes of a node, which is to leave while the others go on.
    ahead: reduces in the background and reads each result at the next reduction, so that the training loop never waits;
        nothing else may use `group` then.
    """

    def __init__(
        self,
        group: Group,
        seconds: float | None,
        ahead: bool = False,
        asked: Callable[[], bool] = lambda: False,
        heeds: bool = True,
    ) -> None:
        self._group = group
        self._lane = Lane(torch.device("cpu")) if ahead else None
        self._under_way: tuple[Ticket, Tensor] | None = None
        self._started = self._asked = time.monotonic()
        self._seconds, self._something_is_asked = seconds, asked
        self._received, self._heeds = 0, heeds
        self._left = self._interval = 1
        self._handlers: dict[int, object] = {}
        self.signal: int | None = None
        self._lost = False
        self.wanted = False
        """Whether rank 0 was asked for something by the time of the last reduction; the same on every rank."""

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # other threads get no signals
            self._handlers = {
                number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._lane is not None and kind is None:  # after an error other ranks may never join the reduction
            self._lane.close()

    def abandon(self) -> None:
        """Ends the background work after an error, once the groups of this rank are closed."""
        if self._lane is not None:
            self._lane.close()

    def ask(self, how: str) -> None:
        """Has the ranks leave their generation; see events.NOW. Any thread may call it."""
        self._lost = self._lost or how == NOW
        self._received = _WISHES.get(how, self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._heeds:
            return
        self._received = number
        if number == signal.SIGINT:
            signal.signal(number, self._handlers[number])  # type: ignore[arg-type]  # the second ends a step that hangs

    @property
    def is_due(self) -> bool:
        """Whether a signal has come or the time is over, as far as this rank knows; then the next `after_step` says
        so."""
        due = self._received > 0 or (self._seconds is not None and self.elapsed >= self._seconds)
        self._left = 1 if due else self._left
        return due

    @property
    def was_over(self) -> str | None:
        """Why there is nothing to train where the time was over before this attempt, else None; the same on every
        rank."""
        over = self._seconds is not None and self._seconds <= 0
        return "the time limit was reached before: there is nothing left to train" if over else None

    @property
    def elapsed(self) -> float:
        """Seconds since construction."""
        return time.monotonic() - self._started

    def after_step(self) -> str | None:
        """Returns why to stop now, or None; the same on every rank. All ranks call it after each step.

        Raises Halted, on all ranks alike, where one was asked to leave its generation after a step; LaunchError on a
        rank that is to leave it at once."""
        if self._lost:
            raise LaunchError("this rank is to leave its generation at once")
        self._left -= 1
        self.wanted = False
        if self._left > 0:
            return None
        wish = self._received
        if self._group.rank == 0 and not wish and self._seconds is not None and self.elapsed >= self._seconds:
            wish = _TIME_IS_OVER
        asked = self._group.rank == 0 and self._something_is_asked()
        wish, asked, self._left = self._ask(torch.tensor([wish, asked, self._next_interval()])).tolist()
        self.wanted = bool(asked)
        self._interval = self._left = max(1, self._left)
        for how in (HALT, SAVE):
            if wish == _WISHES[how]:
                raise Halted(how)
        if wish > _TIME_IS_OVER:
            self.signal = wish
            return f"{STOPPED}{signal.Signals(wish).name}"
        return "the time limit was reached" if wish else None

    def _ask(self, wish: Tensor) -> Tensor:
        """Returns the maximum over the ranks of `wish`, int64 [3]: stop flag, request and interval. With `ahead` it is
        the maximum of the reduction before, zeros at first."""

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
        """Returns on rank 0 the number of steps that take CHECK_SECONDS at the last pace, and 0 elsewhere."""
        now = time.monotonic()
        pace, self._asked = (now - self._asked) / self._interval, now
        return min(MOST_STEPS, max(1, int(CHECK_SECONDS / max(pace, 1e-9)))) if self._group.rank == 0 else 0

"""`shoal top`: a live view of a run, from its directory alone."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live

from shoal.errors import UserError
from shoal.jobs.cluster.backend import NAME as SUBMITTED
from shoal.jobs.cluster.backend import backend, find
from shoal.jobs.lock import NAME as LOCK
from shoal.jobs.lock import holders
from shoal.jobs.status import RankWatch, Status, status_of
from shoal.report.events import Event, events_of
from shoal.report.follow import Follower
from shoal.report.metrics import RunRecords, assemble
from shoal.report.top import RankRow, View, frame, recorded_ranks

REST = 0.9
"""Share of the time at least that this command sleeps: a frame of a million steps takes longer to make."""
ASKED_SECONDS = 5.0
"""Seconds between two questions to the scheduler of a job that nobody has begun."""
FIRST_LOOK = 0.25
"""Seconds over which a single frame takes the CPU use of the ranks."""


class Top:
    """A run whose directory is read again for each frame. Raises UserError where it is no directory of a run."""

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise UserError(f"no such directory: {run_dir} (from {Path.cwd()}). Give the directory of a run")
        self._run_dir = run_dir
        self._follower = Follower(run_dir / "metrics.jsonl")
        self._watch = RankWatch(run_dir)
        self._asked = float("-inf")
        self._waiting: Status | None = None
        self._records, self._events = RunRecords(), list[Event]()
        self._read()
        if self.status.word == "empty" and not any((run_dir / name).exists() for name in (LOCK, SUBMITTED)):
            path = run_dir / "metrics.jsonl"
            raise UserError(
                f"{path} {'has no record' if path.exists() else 'does not exist'}: {run_dir} is not the directory of a "
                "run. Give the directory of a run"
            )

    def _read(self) -> None:
        if self._follower.read():
            self._records = assemble(self._follower.records)
            self._events = events_of(self._follower.records)
        holder, left = holders(self._run_dir)
        self.status: Status = status_of(self._records, holder, time.time(), left)
        if not self.status.goes_on and (waiting := self._submitted()) is not None:
            self.status = waiting

    def _submitted(self) -> Status | None:
        """Returns the state of a job that is still to come, or has ended with nothing recorded, by its scheduler; None
        where there is none."""
        if time.monotonic() - self._asked > ASKED_SECONDS and (self._run_dir / SUBMITTED).exists():
            self._asked = time.monotonic()
            with suppress(UserError):  # nobody answers: what is recorded is all that is known
                job = find(self._run_dir)
                state = backend(job.backend).state(job)
                told = state.goes_on or self._records.run is None
                self._waiting = Status(state.word, state.detail) if told else None
        return self._waiting

    def view(self) -> View:
        """Returns the run as it is now."""
        self._read()
        recorded = recorded_ranks(self._run_dir) if not self.status.goes_on else {}
        now = [RankRow(**asdict(each)) for each in self._watch.read()]
        return View(
            name=str(self._run_dir),
            state=(self.status.word, self.status.detail),
            goes_on=self.status.goes_on,
            records=self._records,
            events=self._events,
            ranks=now or [recorded[rank] for rank in sorted(recorded)],
            damaged=self._follower.damaged,
        )


def show(run_dir: Path, once: bool, interval: float) -> None:
    """Shows the run until it has ended or Ctrl-C is pressed; one frame with `once`, and where stdout is no terminal.

    interval: seconds between frames.
    """
    top, console = Top(run_dir), Console(highlight=False)

    def draw() -> None:
        console.print(frame(top.view(), *console.size), soft_wrap=False)

    if once or not console.is_terminal or console.is_dumb_terminal:
        if top.status.goes_on:
            top.view()
            time.sleep(FIRST_LOOK)
        draw()
        return
    with suppress(KeyboardInterrupt):
        if top.status.goes_on:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while top.status.goes_on:
                    began = time.monotonic()
                    live.update(frame(top.view(), *console.size), refresh=True)
                    taken = time.monotonic() - began
                    time.sleep(max(interval, taken * REST / (1 - REST)))
    draw()

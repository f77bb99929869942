"""The processes of a node: as many as it is to have, some of them ranks of the generation, others on their way there.

A process stays when its generation ends, and with it the state in its memory. One that has ended is replaced.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from shoal.comm.signed import derived
from shoal.elastic.control import Left, Place
from shoal.elastic.events import FOR_GOOD, HALT, NOW
from shoal.elastic.messages import Admitted, Paces, Report, Start
from shoal.elastic.outcomes import outcome_of
from shoal.elastic.pace import paces_of
from shoal.elastic.pulse import Pulse
from shoal.elastic.watchdog import Hang, Watchdog
from shoal.elastic.worker import Worker, log_of, variables_of
from shoal.errors import LaunchError, UserError
from shoal.launch import fork_server
from shoal.launch.fork_server import ForkServer
from shoal.launch.process import MISTAKE_GRACE
from shoal.launch.verdict import Ending, verdict

_LOOK_AT_BOARDS = 0.2
TOGETHER = 2.0
"""Seconds for which a process that is ready waits for those that are getting ready, so that they join together."""
LEAST, STEPS, MOST = 5.0, 3.0, 45.0
"""When a rank is killed that was to leave at once: after so many seconds at least, median steps, seconds at most."""
PAUSE = 1.0
"""Seconds after which a process is replaced, while others go on: they need the cores first."""
TRIES, LONGEST = 3, 300.0
"""How often in a row a process may fail before it is ready, until a node of which none is gives up; the most seconds
until another one is started where others are."""


class Crew:
    """The processes of a node.

    wanted: how many they are. secret: the job's; a generation's own is derived from it, so that ranks of others are
    strangers. folder: for what they tell this process. say: writes a line to the log.
    """

    def __init__(self, wanted: int, secret: bytes, folder: Path, say: Callable[[str], None]) -> None:
        self._wanted, self._secret, self._folder, self._say = wanted, secret, folder, say
        self._job: Admitted | None = None
        self._pulse: Pulse | None = None
        self._forks: ForkServer | None = None
        self._workers: list[Worker] = []
        self._started = self._tries = 0
        self._start: Start | None = None  # the generation under way
        self._watchdog, self._patience, self._looked = Watchdog(), 1.0, 0.0
        self._paces: Paces | None = None
        self._hang: Hang | None = None
        self._how: str | None = None  # the ranks are asked to leave
        self._hurried = False  # they are told to leave at once
        self._killed: float | None = None  # when those are killed that have not left
        self._endings: list[Ending] = []  # of ranks of the generation
        self._left: list[Left] = []  # how those left it that have ended since then
        self._due = float("inf")  # when processes that have ended are replaced

    def begin(self, job: Admitted) -> None:
        """Starts the processes of a job, where that was not done. Raises LaunchError."""
        if self._job is None:
            self._job, self._pulse = job, Pulse(self._folder / "pulse")
            try:
                if fork_server.available():
                    variables = variables_of(self._secret, self._folder, self._wanted)
                    self._forks = ForkServer(job.program, variables, log_of(job, "forks"))
            except OSError as error:
                raise LaunchError(f"the fork server cannot be started: {error}") from error
            self._restock(job)

    @property
    def busy(self) -> bool:
        """Whether there are ranks that have not left their generation."""
        return self._start is not None

    @property
    def ready(self) -> int:
        """How many processes wait for a place."""
        now = time.monotonic()
        under_way = self._start.generation if self._start is not None else 0
        waiting = [each for each in self._workers if each.waits and not each.was_in(under_way)]
        alone = all(each.warm is not None or each.ended for each in self._workers)
        return sum(bool(alone or each.place or now - (each.warm or now) > TOGETHER) for each in waiting)

    @property
    def holds(self) -> bool:
        """Whether a waiting process has the state of the run in memory."""
        return any(each.holds for each in self._workers if each.waits)

    @property
    def paces(self) -> Paces | None:
        """How fast the ranks work, of each part of the model the slowest; None where that is not known."""
        return self._paces

    @property
    def stalled(self) -> bool:
        """Whether none of the ranks comes further, and all wait for others; see standstill.py."""
        return self._how != NOW and self._watchdog.standstill is not None

    def place(self, start: Start) -> None:
        """Gives waiting processes their places in a generation: those first that have the state of the run. Raises
        LaunchError where there are not enough."""
        waiting = [each for each in self._workers if each.waits]
        if len(waiting) < start.ranks:
            raise LaunchError(f"{len(waiting)} processes wait, not {start.ranks}")
        waiting.sort(key=lambda each: (not each.holds, each.place.rank if each.place else 0, each.slot))
        secret = derived(self._secret, "ranks", str(start.generation)).hex()
        for local, worker in enumerate(waiting[: start.ranks]):
            worker.take(Place.of(start, local, worker.slot, secret))
        self._start, self._how, self._killed, self._hang, self._endings = start, None, None, None, []
        self._tries, self._hurried, self._left = 0, False, []
        self._watchdog, self._paces = Watchdog(self._patience), None

    def leave(self, how: str) -> None:
        """Has the ranks leave their generation; see events.NOW."""
        if self._how == NOW:
            return
        self._how = how
        if how == NOW:
            self._hurry()
        for worker in self._training():
            worker.leave(how)

    def give_up(self) -> None:
        """Has the ranks leave at once if they are still stalled."""
        if self.stalled and (hang := self._watchdog.standstill) is not None:
            self._meet(hang)

    def _hurry(self) -> None:
        """Sets when ranks are killed that have not left by then."""
        self._hurried = True
        late = time.monotonic() + min(MOST, max(LEAST, STEPS * self._watchdog.median))
        self._killed = min(self._killed or late, late)

    def kill(self) -> None:
        """Ends the ranks of the generation at once; does not wait."""
        self._how = NOW
        for worker in self._training():
            worker.kill()

    def close(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.ending()
        self._workers, self._wanted = [], 0
        if self._forks is not None:
            self._forks.close()
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    def look(self) -> Report | None:
        """Looks after the processes. Returns how the ranks have left their generation, once all have. Raises what a
        process fails with again and again before it is ready."""
        for worker in self._workers:
            worker.listen()
        now = time.monotonic()
        self._bury(now)
        if self._job is not None and now >= self._due:
            self._restock(self._job)
        if self._start is None:
            return None
        training = self._training()
        if not training:
            start, self._start = self._start, None
            report = self._conclude(start)
            over = report.outcome == "finished" or self._how in FOR_GOOD
            self._due = float("inf") if over else min(self._due, now + PAUSE)
            return report
        failed = [each for each in training if each.process.failed]
        if self._endings or failed:
            mistake = any(each.exit_code == UserError.exit_code for each in self._endings if each.failed)
            if failed or mistake:
                self._killed = min(self._killed or float("inf"), now + MISTAKE_GRACE)
            elif any(each.failed for each in self._endings):
                self.leave(NOW)
        left = [each.left for each in self._workers if each.left and each.was_in(self._start.generation)]
        if self._how is None and any(each.unable for each in left):
            self.leave(HALT)  # who has nothing in memory does not know that fewer went on
        if not self._hurried and any(not each.asked for each in left):
            self._hurry()  # one has lost others, and some here may wait for it where they do not notice
            for worker in training:
                worker.leave(NOW)
        if self._killed is not None and now >= self._killed:
            if (hang := self._hang or self._watchdog.standstill) is not None and not hang.here:
                self._hang = hang.of([each.process.rank for each in training])
                self._say(self._hang.text)
            self.kill()
        if now - self._looked >= _LOOK_AT_BOARDS:
            self._looked = now
            self._watch(training, now)
        return None

    def _watch(self, training: list[Worker], now: float) -> None:
        """Looks at what the ranks show: their pace, and whether some hang."""
        boards = {each.process.rank: each.progress() for each in training}
        stopped = {each.process.rank for each in training if each.is_stopped()}
        self._paces = paces_of(self._start.generation, boards) if self._start is not None else None
        if (hang := self._watchdog.look(boards, stopped, now)) is not None and self._hang is None:
            self._meet(hang)

    def _meet(self, hang: Hang) -> None:
        """Kills ranks that hang here; has the others leave, also where those that hang are elsewhere."""
        self._hang = hang
        self._patience *= 2 if hang.first else 1
        self._say(hang.text)
        for worker in self._training():
            if worker.process.rank in hang.ranks:
                worker.kill()
        self.leave(NOW)

    def _training(self) -> list[Worker]:
        return [each for each in self._workers if each.trains]

    def _bury(self, now: float) -> None:
        """Takes away the processes that have ended."""
        for worker in [each for each in self._workers if each.ended]:
            self._workers.remove(worker)
            self._watchdog.look_last(worker.progress())
            ending = worker.ending()
            if ending.failed or ending.stopped:
                self._due = min(self._due, now + PAUSE if self._workers else now)
            if worker.trains:
                self._endings.append(ending)
            elif worker.left is not None:
                self._left.append(worker.left)
            elif worker.warm is None and ending.failed:
                self._failed_early(ending, now)

    def _failed_early(self, ending: Ending, now: float) -> None:
        """Tries again later where a process has failed before it was ready; gives up where none is."""
        self._tries += 1
        said, code = verdict([ending], self._wanted + 1)
        mistake, others = code == UserError.exit_code, any(each.warm is not None for each in self._workers)
        if not others and (mistake or self._tries >= TRIES):
            failure = ending.failure
            text = failure.message if failure is not None else said.removeprefix("error: ")
            raise UserError(text) if mistake else LaunchError(text)
        print(said, file=sys.stderr, flush=True)
        self._due = now + min(2.0**self._tries, LONGEST) if others else self._due

    def _restock(self, job: Admitted) -> None:
        """Starts the processes that are missing, as soon as they can be forked; without a fork server as they are."""
        if self._forks is not None and self._forks.lives and not self._forks.ready:
            self._due = time.monotonic()
            return
        self._due = float("inf")
        forks = self._forks if self._forks is not None and self._forks.lives else None
        for slot in sorted({*range(self._wanted)} - {each.slot for each in self._workers}):
            self._started += 1
            try:
                log = log_of(job, f"process{self._started}")
                variables = variables_of(self._secret, self._folder, self._wanted)
                worker = Worker(self._started, slot, job.program, self._folder, variables, log, forks)
            except OSError as error:
                if forks is None:
                    text = f"process {self._started} cannot be started: {error}. Try fewer ranks."
                    raise LaunchError(text) from error
                self._say(f"process {self._started} cannot be forked: {error}. It is started anew.")
                self._due = time.monotonic()
                return
            self._workers.append(worker)

    def _conclude(self, start: Start) -> Report:
        """Judges how the ranks have left the generation."""
        known = [*self._left, *(each.left for each in self._workers if each.left is not None)]
        left = [each for each in known if each.generation == start.generation]
        steps = [*(each.step for each in left), self._watchdog.step]
        asked = self._how is not None or any(each.asked for each in left)
        outcome, code, message = outcome_of(self._endings, left, self._hang, self._how, asked, start.size)
        return Report(start.generation, outcome, code, max(steps), message[:2000], self.ready, self.holds)

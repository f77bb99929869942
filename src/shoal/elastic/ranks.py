"""The ranks of a node in one generation, as processes of this host."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from shoal.comm.secret import VARIABLE
from shoal.comm.signed import derived
from shoal.elastic.messages import Admitted, Report, Start
from shoal.elastic.told import VARIABLE as MEMBERSHIP
from shoal.elastic.told import Told
from shoal.elastic.watchdog import Hang, Watchdog
from shoal.errors import LaunchError
from shoal.launch.board import VARIABLE as BOARD
from shoal.launch.board import Progress, read_board
from shoal.launch.process import PEER_GRACE, Seats, Team
from shoal.launch.verdict import verdict

_LOOK_AT_BOARDS = 0.2


class LocalRanks:
    """Starts the ranks of `start`, of which `here` are on this host.

    secret: the job's; the generation's own is derived from it, so that ranks of others are strangers.
    folder: for what the ranks tell this process. say: writes a line to the log.

    Raises LaunchError where a rank cannot be started.
    """

    def __init__(
        self, job: Admitted, start: Start, here: int, secret: bytes, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._generation, self._say = start.generation, say
        self._folder = folder / f"generation{start.generation}"
        self._folder.mkdir()
        own = derived(secret, "ranks", str(start.generation)).hex()
        seats = Seats(start.first, here, start.size, (start.host, start.port), start.generation)
        env = {**os.environ, VARIABLE: own, MEMBERSHIP: told_of(start, derived(secret, "job").hex()[:16]).written()}
        self._boards = {start.first + local: self._folder / f"board{local}" for local in range(here)}
        each = {local: {BOARD: str(self._boards[start.first + local])} for local in range(here)}
        self._team = Team(
            [*job.program, *start.args],
            seats,
            self._folder,
            Path(job.run_dir) / "logs",
            env=env,
            each=each,
            prefix=f"generation{start.generation}-",
        )
        self._watchdog, self._looked = Watchdog(), 0.0
        self._hang: Hang | None = None
        self._asked = False
        self._deadline = float("inf")
        self._report: Report | None = None

    def look(self) -> Report | None:
        """Returns how the ranks have ended, once all have; ends them where one has failed or hangs."""
        if self._report is not None:
            return self._report
        now = time.monotonic()
        if self._team.failures():
            self._deadline = min(self._deadline, now + PEER_GRACE)
        if not self._team.running:
            self._team.end()
            self._report = self._conclude()
            return self._report
        if now >= self._deadline:
            self.kill()
        if now - self._looked >= _LOOK_AT_BOARDS:
            self._looked = now
            self._hang = self._hang or self._watchdog.look(self._progress(), self._stopped(), now)
            if self._hang is not None:
                self.kill()
        return None

    def stop(self) -> None:
        """Has the ranks end at a step boundary, with a checkpoint."""
        self._asked = True
        self._team.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the ranks at once."""
        self._team.kill()

    def _progress(self) -> dict[int, Progress]:
        return {rank: read_board(path) for rank, path in self._boards.items()}

    def _stopped(self) -> set[int]:
        """Returns the ranks whose process is stopped."""
        found = set()
        for rank in self._team.ranks:
            try:
                if rank.running and psutil.Process(rank.process.pid).status() == psutil.STATUS_STOPPED:
                    found.add(rank.rank)
            except psutil.NoSuchProcess:
                continue
        return found

    def _conclude(self) -> Report:
        step = max((board.step for board in self._progress().values()), default=-1)
        endings = self._team.endings()
        said, code = verdict(endings)
        failed = [each for each in endings if each.failed and not (self._asked and each.returncode == -signal.SIGTERM)]
        at_fault = [each for each in failed if not (each.failure and each.failure.lost_peer)]
        if self._hang is not None:
            self._say(self._hang.text)
            return Report(self._generation, "failed" if self._hang.here else "lost", 1, step, self._hang.text[:2000])
        if at_fault:
            print(said, file=sys.stderr, flush=True)
            first = at_fault[0].failure
            text = first.message if first is not None else said.partition("\n")[0].removeprefix("error: ")
            return Report(self._generation, "failed", code or LaunchError.exit_code, step, text[:2000])
        if failed:
            return Report(self._generation, "lost", code, step, "its ranks lost others")
        stopped = self._asked or any(each.stopped for each in endings)
        return Report(self._generation, "stopped" if stopped else "finished", 0, step, "")


def told_of(start: Start, job: str) -> Told:
    """Returns what ranks are told of their generation. `job`: the same in all generations of a job."""
    return Told(job, start.generation, start.nodes, start.why, start.step, start.events)

"""The state of a run, from its directory and from what this host knows of its processes. Nothing here imports torch."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from shoal import units
from shoal.elastic.control import CALLED
from shoal.jobs.lock import Holder, holder_of
from shoal.report.events import FAILED
from shoal.report.metrics import RunRecords

_QUIET_SECONDS, _QUIET_STEPS = 30.0, 10
"""A run is said to be silent after so many seconds and so many of its steps without news."""
RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "JOB_COMPLETION_INDEX")
"""Environment variables of launchers with the rank of a process."""


@dataclass(frozen=True)
class Status:
    """The state of a run: a word, and what is known beyond it.

    word: "starting", "trains", "silent", "ended", "failed", "killed" or "empty"; of a submitted job that no process has
        begun also "waits" or "runs".
    """

    word: str
    detail: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether more is to be expected of this attempt."""
        return self.word in ("starting", "trains", "silent", "waits", "runs")


def status_of(records: RunRecords, holder: Holder | None, now: float, left: Holder | None = None) -> Status:
    """Returns the state of a run. holder: the process that has its directory; now: Unix time; left: the one that had
    it, where another one may be about to take it."""
    run, end = records.run, records.end
    usual = median(step.seconds for step in records.steps[-64:]) if records.steps else 0.0
    last = max(records.steps[-1].time if records.steps else 0.0, (run.time if run is not None else None) or 0.0)
    quiet = max(_QUIET_SECONDS, _QUIET_STEPS * usual)
    if holder is not None:
        newer = run is None or end is not None or (run.time is not None and holder.taken / 1e9 > run.time)
        if newer:
            return Status("starting", f"process {holder.pid} on {holder.host}")
        if last and now - last > quiet:
            return Status("silent", f"no news for {units.duration(now - last)}")
        return Status("trains")
    if left is not None and end is None and now - max(last, left.taken / 1e9) < quiet:
        return Status("starting", f"rank 0 has ended, process {left.pid} on {left.host}: others may go on")
    if end is not None:
        failed = end.reason.startswith(FAILED)
        return Status("failed" if failed else "ended", end.reason.removeprefix(FAILED).strip())
    return (
        Status("killed", "no process has the directory, and nothing was said") if run is not None else Status("empty")
    )


@dataclass(frozen=True)
class RankProcess:
    """A rank on this host. memory: bytes, with shared pages divided; cpu: cores that it keeps busy."""

    rank: int
    pid: int
    memory: int
    cpu: float


class RankWatch:
    """The processes of the ranks of a run on this host.

    They are the process that has the run directory and its siblings with a rank of their own, under any launcher that
    starts the ranks of a host from one process; of nodes that come and go those of the node of rank 0.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[int, psutil.Process] = {}

    def read(self) -> list[RankProcess]:
        """Returns the ranks as they are now; CPU use is a mean since the call before. None of other users."""
        holder = holder_of(self._run_dir)
        if holder is None or holder.host != socket.gethostname():
            return []
        with suppress(psutil.Error):
            first = psutil.Process(holder.pid)
            parent = first.parent()
            family = [first] if parent is None else parent.children()
            ranks = {rank: each for each in family if (rank := _rank(each)) is not None} | {_rank(first) or 0: first}
            self._known = {each.pid: self._known.get(each.pid, each) for each in ranks.values()}
            return [_use(rank, self._known[ranks[rank].pid]) for rank in sorted(ranks)]
        return []


def _rank(process: psutil.Process) -> int | None:
    with suppress(psutil.Error):
        called, number = process.name()[: len(CALLED)], process.name()[len(CALLED) :]
        return int(number) if called == CALLED and number.isdecimal() else rank_in(process.environ())
    return None


def rank_in(environ: Mapping[str, str]) -> int | None:
    """Returns the rank that a launcher gave a process with these variables; None where none did."""
    given = (environ[name] for name in RANK_VARIABLES if environ.get(name, "").isdecimal())
    return next(map(int, given), None)


def _use(rank: int, process: psutil.Process) -> RankProcess:
    with process.oneshot():
        memory = process.memory_full_info()
        return RankProcess(rank, process.pid, getattr(memory, "pss", 0) or memory.rss, process.cpu_percent() / 100)

"""What `recovery` asks of a job: to go on after faults, one after the other, and to train while workers are killed."""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.recovery_running import WORKERS, Commit, Running, kill

SCENARIOS = {
    "kill": "a worker is killed",
    "stop": "a worker is stopped",
    "node": "a node is killed with its workers",
    "rejoin": "a lost node comes back: longest time without a step",
    "coordinator": "what coordinates is killed",
}
"""In this order a job meets them: the node that is lost is the one that comes back."""
LIMIT, START, BACK, STEADY, KILL_EVERY, UNDISTURBED = 90.0, 120.0, 45.0, 2.0, 30.0, 10.0
"""Seconds: without a step, after which a job is lost; for a job to begin; for it to have all workers again; of training
before a fault; between kills; over which a pace is measured."""


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    """Waits until `condition()` is true; returns whether it became so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Faults:
    """The faults that one job takes, in a row."""

    def __init__(self, job: Running) -> None:
        self._job = job
        self._lost: str | None = None  # since the last fault: a worker or a node
        self._first = True

    @property
    def over(self) -> bool:
        """Whether the job has lost what cannot come back."""
        return self._lost == "node" and not self._job.comes_back

    def ready(self, scenario: str) -> bool:
        """Brings back what the last fault took, unless `scenario` is about that; returns whether all workers train."""
        if scenario == "rejoin" and self._lost == "node":
            return True
        lost, self._lost, first, self._first = self._lost, None, self._first, False
        if lost == "node":
            self._job.come_back()
        elif lost == "worker":
            self._job.revive()
        return all_train(self._job, START if first else BACK)

    def trial(self, scenario: str) -> dict[str, Any]:
        """One fault of a job that is `ready`; returns the seconds until the next committed step (None: not within
        LIMIT) and the steps lost."""
        job = self._job
        if scenario != "rejoin":
            return self._strike(scenario)
        if self._lost != "node":
            if self._strike("node")["seconds"] is None:
                return {"seconds": None, "lost": None, "why": "the job did not go on without the node"}
            time.sleep(STEADY)
        self._lost = None
        return _rejoin(job)

    def _strike(self, scenario: str) -> dict[str, Any]:
        job = self._job
        victims = {"node": job.node, "coordinator": job.coordinator}.get(scenario, lambda: [job.workers()[-1]])()
        self._lost = "node" if scenario in ("node", "coordinator") else "worker"
        before = job.commits()[-1]
        kill(victims, signal.SIGSTOP if scenario == "stop" else signal.SIGKILL)
        at = time.time()
        found = next_step(job, at, max(before.step, job.commits()[-1].step))
        kill(victims)  # one that was stopped may still be there
        return found


def all_train(job: Running, seconds: float = START) -> bool:
    """Waits until all workers have trained together for a while; for at most `seconds` until they do."""
    if not wait_for(lambda: (job.commits() or [Commit(0, 0, 0)])[-1].world == WORKERS, seconds):
        return False
    time.sleep(STEADY)
    job.commits()
    job.forget()
    return job.commits()[-1].world == WORKERS


def next_step(job: Running, at: float, newest: int) -> dict[str, Any]:
    """Waits for a step beyond those that were committed when the fault came. Workers that were about to commit the step
    that all of them had computed do so: that one does not count."""

    def found() -> Commit | None:
        return next((each for each in job.commits() if each.time > at and each.step > newest + 1), None)

    if not wait_for(found, LIMIT):
        return {"seconds": None, "lost": None, "why": f"no step for {LIMIT:.0f} s"}
    commit = found()
    assert commit is not None
    later = [each.step for each in job.commits() if each.time > at]
    oldest = min(later)  # a worker may write its line of the newest step after the fault
    return {"seconds": commit.time - at, "lost": newest - oldest + 1 if oldest < newest else 0}


def _rejoin(job: Running) -> dict[str, Any]:
    """The longest time without a step while a node comes back; beside it an undisturbed step after that (`step`)."""
    at = time.time()
    job.come_back()
    if not wait_for(lambda: job.commits()[-1].world == WORKERS, LIMIT):
        return {"seconds": None, "lost": None, "why": f"the node was not back after {LIMIT:.0f} s"}
    time.sleep(STEADY)
    times = [at, *(each.time for each in job.commits() if each.time > at)]
    steps = [each.step for each in job.commits() if each.time > at]
    back = max((earlier - later for earlier, later in pairwise(steps)), default=0)
    stall = max(later - earlier for earlier, later in pairwise(times))
    pace = _reached(job, times[-1]) - _reached(job, times[-1] - STEADY / 2)
    return {
        "seconds": stall,
        "lost": back + 1 if back > 1 else 0,  # workers write a step's lines in any order
        "step": STEADY / 2 / pace if pace else None,
    }


def goodput(job: Running, seconds: float) -> dict[str, Any]:
    """The steps in `seconds` with a worker killed every KILL_EVERY, over those at the undisturbed pace.

    That is the mean of the paces of the first UNDISTURBED seconds and of as many before each kill, where all workers
    have trained in them: the pace of a machine that others use drifts.
    """
    if not all_train(job):
        return {"share": None, "why": "the job did not begin"}
    time.sleep(UNDISTURBED)
    began = time.time()
    paces, kills = [_pace(job, began)], 0
    while (left := seconds - (time.time() - began)) > 0:
        time.sleep(min(KILL_EVERY, left))
        if left > KILL_EVERY and (workers := job.workers()):
            paces.append(_pace(job, time.time()))
            kill([workers[-1]])
            kills += 1
            job.revive()
    ended = time.time()
    known = [pace for pace in paces if pace is not None]
    if not known:
        return {"share": None, "why": "its workers have not trained together for long enough"}
    done = _reached(job, ended) - _reached(job, began)
    share = done / (statistics.fmean(known) * (ended - began))
    return {"share": share, "kills": kills, "steps_a_second": known}


def _reached(job: Running, at: float) -> int:
    """The newest step that was committed by then."""
    return max((each.step for each in job.commits() if each.time <= at), default=0)


def _pace(job: Running, until: float) -> float | None:
    """Steps a second in the UNDISTURBED seconds before; None where not all workers have trained in them."""
    worlds = {each.world for each in job.commits() if until - UNDISTURBED <= each.time <= until}
    return (_reached(job, until) - _reached(job, until - UNDISTURBED)) / UNDISTURBED if worlds == {WORKERS} else None


def summary(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and p95 over all trials, in which a job that was lost counts as infinitely slow (null). Of rejoins also
    how much longer than an undisturbed step those took that went on."""
    seconds = sorted(math.inf if each["seconds"] is None else each["seconds"] for each in trials)
    median = statistics.median(seconds)
    p95 = seconds[min(len(seconds) - 1, math.ceil(0.95 * len(seconds)) - 1)]
    lost = [each["lost"] for each in trials if each["lost"] is not None]
    beyond = [each["seconds"] - each["step"] for each in trials if each.get("step") is not None]
    return {
        "recovered": sum(math.isfinite(each) for each in seconds),
        "trials": len(trials),
        "median_s": median if math.isfinite(median) else None,
        "p95_s": p95 if math.isfinite(p95) else None,
        **({"median_beyond_a_step_s": statistics.median(beyond)} if beyond else {}),
        "most_steps_lost": max(lost, default=None),
        "samples": list(trials),
    }

"""Question `recovery`: how long does a job stand still when a worker dies, hangs, leaves or comes?

    python -m benchmarks.recovery [--trials 20] [--only shoal,torchft] [--scenarios kill,stop] [--quick]

4 workers on two nodes of this host (loopback, gloo, CPU) train the same tiny GPT under Shoal, torchrun (with and
without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), TorchFT (as it comes, and with a heartbeat timeout of 1 s) and Ray Train.
Each trial starts the job anew, waits until all workers train, and then: kills a worker (SIGKILL), stops one (SIGSTOP),
kills a node with all its workers, kills what coordinates, or lets a lost node come back. Contenders take turns trial by
trial. Then each trains for `--goodput` seconds with a worker killed every 30 s; and Shoal's step is timed with and
without nodes that may come and go.

Seconds are from the fault to the next committed step; those of a rejoin are the longest time without a step. A job that
has committed nothing for LIMIT seconds counts as lost. Packages of others are looked for in build/peers, an environment
that sees this one's torch:

    python -m venv build/peers
    python -c "import site; print(site.getsitepackages()[0])" > build/peers/lib/python3.11/site-packages/shared.pth
    build/peers/bin/pip install -c constraints.txt torchft-nightly 'ray[train]'

Writes results/recovery.json, also after Ctrl-C. 20 trials of all take about eight hours, since a job that never goes on
is waited for 90 s; `--only shoal` takes one.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.recovery_contenders import CONTENDERS, JOB, WORKERS, Commit, Contender, Running, kill, running
from benchmarks.targets import Target, judge, print_targets
from shoal.report.metrics import read_metrics

SCENARIOS = {
    "kill": "a worker is killed",
    "stop": "a worker is stopped",
    "node": "a node is killed with its workers",
    "coordinator": "what coordinates is killed",
    "rejoin": "a lost node comes back: longest time without a step",
}
LIMIT, START, STEADY, KILL_EVERY = 90.0, 120.0, 2.0, 30.0
"""Seconds: without a step, after which a job is lost; for a job to begin; of training before a fault; between kills."""
USUAL = {"trials": 20, "goodput": 150.0, "steady": 2000}
TARGETS = (
    Target("kill", "seconds from kill -9 to the next committed step (median)", 0.5, at_least=False, unit=" s"),
    Target("stop", "seconds from SIGSTOP to the next committed step (median)", 2.0, at_least=False, unit=" s"),
    Target(
        "node", "seconds from the loss of a node to the next committed step (median)", 2.0, at_least=False, unit=" s"
    ),
    Target(
        "coordinator",
        "seconds from the loss of the coordinator to the next committed step",
        3.0,
        at_least=False,
        unit=" s",
    ),
    Target("rejoin", "seconds without a step while a node joins (median)", 0.2, at_least=False, unit=" s"),
    Target("lost", "committed steps lost (the most of any trial)", 0.0, at_least=False, unit=""),
    Target("goodput", "share of the steps with a worker killed every 30 s", 0.97),
    Target("steady", "step time with nodes that may come and go over that without", 1.01, at_least=False),
)


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    """Waits until `condition()` is true; returns whether it became so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def all_train(job: Running) -> bool:
    """Waits until all workers have trained together for a while."""
    if not wait_for(lambda: (job.commits() or [Commit(0, 0, 0)])[-1].world == WORKERS, START):
        return False
    time.sleep(STEADY)
    return job.commits()[-1].world == WORKERS


def trial(job: Running, scenario: str) -> dict[str, Any]:
    """One fault; returns the seconds until the next committed step (None: not within LIMIT) and the steps lost."""
    if not all_train(job):
        return {"seconds": None, "lost": None, "why": "the job did not begin"}
    if scenario == "rejoin":
        return _rejoin(job)
    victims = {"node": job.node, "coordinator": job.coordinator}.get(scenario, lambda: [job.workers()[-1]])()
    before = job.commits()[-1]
    kill(victims, signal.SIGSTOP if scenario == "stop" else signal.SIGKILL)
    at = time.time()
    return _next(job, at, max(before.step, job.commits()[-1].step))


def _next(job: Running, at: float, newest: int) -> dict[str, Any]:
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
    kill(job.node())
    newest, at = job.commits()[-1].step, time.time()
    if _next(job, at, newest)["seconds"] is None:
        return {"seconds": None, "lost": None, "why": "the job did not go on without the node"}
    time.sleep(STEADY)
    at, newest = time.time(), job.commits()[-1].step
    job.come_back()
    if not wait_for(lambda: job.commits()[-1].world == WORKERS, LIMIT):
        return {"seconds": None, "lost": None, "why": f"the node was not back after {LIMIT:.0f} s"}
    time.sleep(STEADY)
    times = [at, *(each.time for each in job.commits() if each.time > at)]
    steps = [each.step for each in job.commits() if each.time > at]
    back = max((earlier - later for earlier, later in pairwise(steps)), default=0)
    stall = max(later - earlier for earlier, later in pairwise(times))
    return {"seconds": stall, "lost": back + 1 if back > 1 else 0}  # workers write a step's lines in any order


def goodput(job: Running, seconds: float) -> dict[str, Any]:
    """The steps in `seconds` with a worker killed every KILL_EVERY, over those at the pace before."""
    if not all_train(job):
        return {"share": None, "why": "the job did not begin"}
    began, first = time.time(), job.commits()[-1].step
    wait_for(lambda: time.time() - began > 10.0, 11.0)
    pace = (max(each.step for each in job.commits()) - first) / (time.time() - began)
    first, began, kills = max(each.step for each in job.commits()), time.time(), 0
    while time.time() - began < seconds:
        time.sleep(min(KILL_EVERY, seconds - (time.time() - began)))
        if time.time() - began < seconds and (workers := job.workers()):
            kill([workers[-1]])
            kills += 1
            job.revive()
    done = max(each.step for each in job.commits()) - first
    return {"share": done / (pace * (time.time() - began)), "kills": kills, "steps_a_second": pace}


def steady(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step of Shoal's with 4 ranks of this host, without `--nodes` and with it, by turns."""
    (folder / "corpus").mkdir(parents=True)
    text = "\n".join(f"{i} + {i} = {2 * i}" for i in range(4000))
    (folder / "corpus" / "all.txt").write_text(text)
    (folder / "job.toml").write_text(JOB.replace("CORPUS", str(folder / "corpus")))
    found: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds):
        for name, more in (("without", []), ("with", ["--nodes=1:1"])):
            run = folder / f"{name}{number}"
            given = [f"--set=run.dir={str(run)!r}", f"--set=train.steps={steps}", "--set=run.save_every=0"]
            command = [sys.executable, "-m", "shoal.cli", "train", str(folder / "job.toml"), f"--nproc={WORKERS}"]
            subprocess.run([*command, *more, *given], check=True, capture_output=True)
            times = [each.seconds for each in read_metrics(run / "metrics.jsonl").steps[steps // 4 :]]
            found[name].append(1e3 * statistics.median(times))
    ratios = [one / other for one, other in zip(found["with"], found["without"], strict=True)]
    return {"milliseconds": found, "ratio": statistics.median(ratios), "range": [min(ratios), max(ratios)]}


def summary(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and p95 over all trials, in which a job that was lost counts as infinitely slow (null)."""
    seconds = sorted(math.inf if each["seconds"] is None else each["seconds"] for each in trials)
    median = statistics.median(seconds)
    p95 = seconds[min(len(seconds) - 1, math.ceil(0.95 * len(seconds)) - 1)]
    lost = [each["lost"] for each in trials if each["lost"] is not None]
    return {
        "recovered": sum(math.isfinite(each) for each in seconds),
        "trials": len(trials),
        "median_s": median if math.isfinite(median) else None,
        "p95_s": p95 if math.isfinite(p95) else None,
        "most_steps_lost": max(lost, default=None),
        "samples": list(trials),
    }


class Measured:
    """What was measured so far, contenders by turns. `say`: told of each trial."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> None:
        self._arguments, self._folder, self._say = arguments, folder, say
        self._missing = {name: CONTENDERS[name].missing() for name in arguments.only}
        self._able = {name: CONTENDERS[name] for name in arguments.only if not self._missing[name]}
        self._trials: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in self._able}
        self._shares: dict[str, dict[str, Any]] = {}
        self._steady: dict[str, Any] | None = None

    def measure(self) -> None:
        """Runs all trials, then goodput and the cost of a step."""
        for number in range(self._arguments.trials):
            for scenario in self._arguments.scenarios:
                for name, contender in self._able.items():
                    if scenario not in contender.without:
                        found = self._run(contender, f"trial {number + 1}, {scenario}, {name}", trial, scenario)
                        self._trials[name].setdefault(scenario, []).append(found)
        for name, contender in self._able.items() if self._arguments.goodput else ():
            self._shares[name] = self._run(contender, f"goodput, {name}", goodput, self._arguments.goodput)
        if self._arguments.steady and "shoal" in self._able:
            self._steady = steady(self._folder / "steady", self._arguments.steady, 5)

    def _run(
        self, contender: Contender, what: str, question: Callable[..., dict[str, Any]], *more: Any
    ) -> dict[str, Any]:
        where = self._folder / re.sub(r"\W+", "-", what)
        with running(contender, where) as job:
            found = question(job, *more)
        shutil.rmtree(where, ignore_errors=True)
        self._say(f"{what}: {found}")
        return found

    def results(self) -> dict[str, Any]:
        """What there is for the record."""
        return {
            "scenarios": SCENARIOS,
            "contenders": {
                name: {
                    "note": contender.note,
                    "scenarios": {scenario: summary(trials) for scenario, trials in self._trials[name].items()},
                    "goodput": self._shares.get(name),
                }
                for name, contender in self._able.items()
            },
            "not_run": {name: why for name, why in self._missing.items() if why},
            "steady": self._steady,
        }


def figures(results: dict[str, Any]) -> dict[str, float | None]:
    """What the targets are about."""
    ours = results["contenders"].get("shoal", {"scenarios": {}, "goodput": None})
    found: dict[str, float | None] = {name: each["median_s"] for name, each in ours["scenarios"].items()}
    lost = [each["most_steps_lost"] for each in ours["scenarios"].values() if each["most_steps_lost"] is not None]
    found["lost"] = max(lost) if lost else None
    found["goodput"] = ours["goodput"]["share"] if ours["goodput"] else None
    found["steady"] = results["steady"]["ratio"] if results["steady"] else None
    return found


def show(results: dict[str, Any]) -> None:
    """Prints medians and p95 as a table."""
    table = Table(title="seconds to the next committed step: median / p95 (recovered of trials)", title_justify="left")
    table.add_column("contender")
    for scenario in SCENARIOS:
        table.add_column(scenario, justify="right")
    table.add_column("most steps lost", justify="right")
    table.add_column("goodput", justify="right")
    for name, row in results["contenders"].items():
        cells, lost = [], []
        for scenario in SCENARIOS:
            each = row["scenarios"].get(scenario)
            lost += [each["most_steps_lost"]] if each and each["most_steps_lost"] is not None else []
            told = (
                [f"{each[key]:.2f}" if each[key] is not None else "never" for key in ("median_s", "p95_s")]
                if each
                else []
            )
            cells.append(f"{' / '.join(told)} ({each['recovered']}/{each['trials']})" if each else "-")
        share = row["goodput"]["share"] if row["goodput"] else None
        table.add_row(name, *cells, str(max(lost)) if lost else "-", "-" if share is None else f"{share:.1%}")
    console = Console(width=180)
    console.print(table)
    for name, why in results["not_run"].items():
        console.print(f"{name} was not run: {why}", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int)
    parser.add_argument("--only", type=harness.several(list(CONTENDERS)), default=list(CONTENDERS))
    parser.add_argument("--scenarios", type=harness.several(list(SCENARIOS)), default=list(SCENARIOS))
    parser.add_argument("--goodput", type=float, help="seconds, 150; 0 for none")
    parser.add_argument("--steady", type=int, help="steps, 2000; 0 for none")
    parser.add_argument("--quick", action="store_true", help="one trial, no goodput, few steps")
    arguments = parser.parse_args()
    usual = {"trials": 1, "goodput": 0.0, "steady": 200} if arguments.quick else USUAL
    vars(arguments).update({name: value for name, value in usual.items() if getattr(arguments, name) is None})
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    measured = Measured(arguments, folder, lambda text: print(text, flush=True))
    try:
        measured.measure()
    except KeyboardInterrupt:
        print("interrupted: the record has what was measured until now")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results = measured.results()
    show(results)
    results["targets"] = judge(TARGETS, figures(results))
    print_targets(results["targets"])
    print(harness.write_record("recovery", vars(arguments), results))


if __name__ == "__main__":
    main()

"""Question `recovery`: how long does a job stand still when a worker dies, hangs, leaves or comes?

    python -m benchmarks.recovery [--only shoal,torchft]              # all of it
    python -m benchmarks.recovery --trials 20 --only shoal            # the faults alone, 20 of each kind
    python -m benchmarks.recovery --trials 20 --scenarios kill,node   # some kinds of faults, the others another time
    python -m benchmarks.recovery --trials 20 --peer-trials 5         # the others are slower: about an hour
    python -m benchmarks.recovery --goodput --only shoal              # a worker killed every 30 s alone
    python -m benchmarks.recovery --steady                            # what a step costs alone

4 workers on two nodes of this host (loopback, gloo, CPU) train the same tiny GPT under Shoal, torchrun (with and
without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), TorchFT (as it comes, and with a heartbeat timeout of 1 s) and Ray Train.
Trials: a job begins, waits until all workers train, and then takes faults, of each kind in turn: a worker is killed
(SIGKILL), one is stopped (SIGSTOP), a node is killed with all its workers, comes back, and what coordinates is killed.
Between two faults what was lost is brought back, and all workers train for a while. A job that goes on takes
`--in-a-row` faults; one that does not is followed by another. Contenders take turns, job by job. One that never went on
in the first `--give-up` trials of a kind is not asked again, since each takes 90 s. Goodput: each trains for
`--goodput` seconds with a worker killed every 30 s. Steady: what a step of Shoal's takes with and without nodes that
may come and go, job by job, and with and without buddies (ZeRO 3 of a 3M GPT, 2,048 tokens a rank), which one job turns
on and off: its time, which others on the machine make longer or shorter, and the time for which all its processes keep
cores busy, which they do less.

Seconds are from the fault to the next committed step; those of a rejoin are the longest time without a step. A job that
has committed nothing for LIMIT seconds counts as lost. Packages of others are looked for in build/peers, an environment
that sees this one's torch:

    python -m venv build/peers
    here=$(python -c "import site; print(site.getsitepackages()[0])")
    echo "import site; site.addsitedir('$here')" > build/peers/lib/python3.11/site-packages/shared.pth
    build/peers/bin/pip install -c constraints.txt -e '.[peers]'

Writes results/recovery.json (also after Ctrl-C or SIGTERM), recovery_goodput.json and recovery_steady.json. All that
the first says of one kind of fault is of one run, which `measured` names: `--scenarios` leaves the others as they are.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.recovery_contenders import CONTENDERS, Contender, running
from benchmarks.recovery_steady import steady
from benchmarks.recovery_trials import SCENARIOS, Faults, goodput, summary
from benchmarks.targets import Target, judge, print_targets

TRIALS, GOODPUT, STEADY_STEPS, ROUNDS = 20, 150.0, 2000, 5
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
    Target(
        "rejoin",
        "seconds without a step while a node joins, beyond those of a step; the copy is in them (median)",
        0.2,
        at_least=False,
        unit=" s",
    ),
    Target("lost", "committed steps lost (the most of any trial)", 0.0, at_least=False, unit=""),
)
GOODPUT_TARGETS = (Target("goodput", "share of the steps with a worker killed every 30 s", 0.97),)
STEADY_TARGETS = (
    Target("nodes", "step time with nodes that may come and go over that without", 1.01, at_least=False),
    Target("nodes_cpu", "CPU time of a step with nodes that may come and go over that without", 1.01, at_least=False),
    Target("buddies", "step time of ZeRO 3 with buddies over that without", 1.01, at_least=False),
    Target("buddies_cpu", "CPU time of a step of ZeRO 3 with buddies over that without", 1.01, at_least=False),
)
Say = Callable[[str], None]


class Trials:
    """The faults of contenders that take turns, job by job.

    able: the contenders, by name. arguments: of the command. folder: for the jobs. say: told of each trial.
    """

    def __init__(self, able: Mapping[str, Contender], arguments: argparse.Namespace, folder: Path, say: Say) -> None:
        self._able, self._folder, self._say = able, folder, say
        self._in_a_row, self._give_up = arguments.in_a_row, arguments.give_up
        self._jobs = 0
        each = {name: [one for one in arguments.scenarios if one not in able[name].without] for name in able}
        peers = arguments.trials if arguments.peer_trials is None else arguments.peer_trials
        self._left = {name: each[name] * (arguments.trials if name == "shoal" else peers) for name in able}
        self._found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {} for name in able}
        self._not_whole = dict.fromkeys(able, 0)

    def measure(self) -> None:
        """Runs all trials."""
        while any(self._left.values()):
            for name, left in self._left.items():
                if left:
                    self._turn(name, left)

    def _turn(self, name: str, left: list[str]) -> None:
        """Has a new job take the next faults of those that are `left`, until it does not go on."""
        self._jobs += 1
        where = self._folder / f"job{self._jobs}"
        with running(self._able[name], where) as job:
            faults = Faults(job)
            for number in range(self._in_a_row):
                while left and self._hopeless(name, left[0]):
                    left.pop(0)
                if not left or faults.over:
                    break
                if faults.ready(left[0]):
                    found = faults.trial(left[0])
                elif number == 0:
                    found = {"seconds": None, "lost": None, "why": "the job did not begin"}
                else:
                    self._say(f"job {self._jobs}, {name}: not all workers came back after the last fault")
                    self._not_whole[name] += 1
                    break
                scenario = left.pop(0)
                self._found[name].setdefault(scenario, []).append(found)
                self._say(f"job {self._jobs}, {name}, {scenario}: {found}")
                if found["seconds"] is None:
                    break
        shutil.rmtree(where, ignore_errors=True)

    def _hopeless(self, name: str, scenario: str) -> bool:
        """Whether the contender never went on in the first trials of a kind."""
        found = self._found[name].get(scenario, [])
        return len(found) >= self._give_up and all(each["seconds"] is None for each in found)

    def results(self) -> dict[str, Any]:
        """What there is for the record. `not_whole`: how often a job went on, but not all of its workers came back."""
        return {
            name: {
                "note": contender.note,
                "not_whole": self._not_whole[name],
                "scenarios": {scenario: summary(trials) for scenario, trials in self._found[name].items()},
            }
            for name, contender in self._able.items()
        }


def joined(new: Mapping[str, Any], old: Mapping[str, Any], scenarios: Sequence[str]) -> dict[str, Any]:
    """The contenders of a run that was about `scenarios`, and what an older record says of the other ones."""
    names = [*new, *(name for name in old if name not in new)]
    found = {name: dict(new[name] if name in new else old[name]) for name in names}
    for name, each in found.items():
        before, now = (of.get(name, {}).get("scenarios", {}) for of in (old, new))
        kept = {scenario: trials for scenario, trials in before.items() if scenario not in scenarios}
        each["scenarios"] = {scenario: (kept | now)[scenario] for scenario in SCENARIOS if scenario in kept | now}
    return found


def figures(contenders: Mapping[str, Any]) -> dict[str, float | None]:
    """What the targets of the trials are about."""
    ours = contenders.get("shoal", {"scenarios": {}})["scenarios"]
    found: dict[str, float | None] = {name: each["median_s"] for name, each in ours.items()}
    found["rejoin"] = ours.get("rejoin", {}).get("median_beyond_a_step_s", found.get("rejoin"))
    lost = [each["most_steps_lost"] for each in ours.values() if each["most_steps_lost"] is not None]
    return {**found, "lost": max(lost) if lost else None}


def show(contenders: Mapping[str, Any]) -> None:
    """Prints medians and p95 as a table."""
    table = Table(title="seconds to the next committed step: median / p95 (recovered of trials)", title_justify="left")
    table.add_column("contender")
    for scenario in SCENARIOS:
        table.add_column(scenario, justify="right")
    table.add_column("most steps lost", justify="right")
    for name, row in contenders.items():
        cells, lost = [], []
        for scenario in SCENARIOS:
            each = row["scenarios"].get(scenario)
            if each is None:
                cells.append("-")
                continue
            lost += [each["most_steps_lost"]] if each["most_steps_lost"] is not None else []
            told = (f"{each[key]:.2f}" if each[key] is not None else "never" for key in ("median_s", "p95_s"))
            cells.append(f"{' / '.join(told)} ({each['recovered']}/{each['trials']})")
        table.add_row(name, *cells, str(max(lost)) if lost else "-")
    Console(width=180).print(table)


def _trials(trials: Trials, arguments: argparse.Namespace) -> dict[str, Any]:
    old = harness.read_record("recovery") if set(arguments.scenarios) < set(SCENARIOS) else None
    contenders, measured = trials.results(), dict[str, Any]()
    if old is not None:
        contenders = joined(contenders, old["results"]["contenders"], arguments.scenarios)
        one = {"date": old["date"], "commit": old["commit"]}
        measured = {name: old["results"].get("measured", {}).get(name, one) for name in SCENARIOS}
    measured |= {name: {"date": harness.now(), "commit": harness.commit()} for name in arguments.scenarios}
    show(contenders)
    found = {"scenarios": SCENARIOS, "measured": measured, "contenders": contenders}
    return {**found, "targets": judge(TARGETS, figures(contenders))}


def _goodput(able: Mapping[str, Contender], arguments: argparse.Namespace, folder: Path, say: Say) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (name, contender) in enumerate(able.items()):
        with running(contender, folder / f"goodput{number}") as job:
            found[name] = goodput(job, arguments.goodput)
        say(f"goodput, {name}: {found[name]}")
    ours = found.get("shoal", {}).get("share")
    return {"contenders": found, "targets": judge(GOODPUT_TARGETS, {"goodput": ours})}


def _steady(arguments: argparse.Namespace, folder: Path, say: Say) -> dict[str, Any]:
    found = steady(folder / "steady", arguments.steady, ROUNDS)
    say(f"steady: {found}")
    ratios = {
        f"{name}{more}": each[what]["ratio"]
        for name, each in found.items()
        for what, more in (("milliseconds", ""), ("cpu", "_cpu"))
    }
    return {"costs": found, "targets": judge(STEADY_TARGETS, ratios)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="?", const=TRIALS, help=f"of each kind of fault, {TRIALS}")
    parser.add_argument("--peer-trials", type=int, help="of each kind of fault, of all but Shoal; by default as many")
    parser.add_argument("--goodput", type=float, nargs="?", const=GOODPUT, help=f"seconds, {GOODPUT:.0f}")
    parser.add_argument("--steady", type=int, nargs="?", const=STEADY_STEPS, help=f"steps, {STEADY_STEPS}")
    parser.add_argument("--only", type=harness.several(list(CONTENDERS)), default=list(CONTENDERS))
    parser.add_argument("--scenarios", type=harness.several(list(SCENARIOS)), default=list(SCENARIOS))
    parser.add_argument("--in-a-row", type=int, default=len(SCENARIOS), help="faults that one job takes at most")
    parser.add_argument("--give-up", type=int, default=3, help="trials of a kind, all in vain, to end with")
    parser.add_argument("--quick", action="store_true", help="one trial of each kind, and few steps")
    arguments = parser.parse_args()
    if arguments.trials is arguments.goodput is arguments.steady is None:
        usual = {"trials": 1, "steady": 200} if arguments.quick else {"trials": TRIALS, "goodput": GOODPUT}
        vars(arguments).update({"steady": STEADY_STEPS, **usual})
    return arguments


def main() -> None:
    arguments = _arguments()
    missing = {name: CONTENDERS[name].missing() for name in arguments.only}
    able = {name: CONTENDERS[name] for name in arguments.only if not missing[name]}
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))

    def say(text: str) -> None:
        print(text, flush=True)

    def record(name: str, results: dict[str, Any]) -> None:
        not_run = {each: why for each, why in missing.items() if why}
        for each, why in not_run.items():
            say(f"{each} was not run: {why}")
        print_targets(results["targets"])
        say(str(harness.write_record(name, vars(arguments), {**results, "not_run": not_run})))

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if arguments.trials:
            trials = Trials(able, arguments, folder, say)
            try:
                trials.measure()
            finally:  # also what was measured until it was interrupted, or something failed
                record("recovery", _trials(trials, arguments))
        if arguments.goodput:
            record("recovery_goodput", _goodput(able, arguments, folder, say))
        if arguments.steady:
            record("recovery_steady", _steady(arguments, folder, say))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

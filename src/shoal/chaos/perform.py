"""Performs a schedule of faults: the reference first, then the run with the faults one after the other."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.chaos.faults import FLIPS, LASTING, Fault, Schedule
from shoal.chaos.inject import Injector
from shoal.chaos.nodes import Cluster, ended
from shoal.chaos.steps import Steps, chosen_pace
from shoal.chaos.verdict import (
    Check,
    Files,
    batches_of,
    check_codes,
    check_losses,
    check_processes,
    check_samples,
    read_dealt,
)
from shoal.chaos.watch import PATIENCE, Over, Watch, steps_of
from shoal.errors import LaunchError, UserError
from shoal.jobs.config import Job
from shoal.jobs.drill import VARIABLE
from shoal.jobs.read import load_job

_UNSURE = ("drop", "hangup")
"""Faults that need not end a generation: a connection may be one that nobody uses, or one that is made again."""
_UNSURE_SECONDS = 5.0
_VOTES = 5
"""Steps between votes, where a job has none and bits are to flip."""
_ASIDE = 45.0
"""Seconds for which nodes are waited for that are away."""
_SEVERAL = ("drain", "node", "coordinator", "rejoin")
"""Faults that take a node away."""
END_UNKNOWN = "the end of the job has to be known: give train.steps"


@dataclass(frozen=True)
class Row:
    """What came of a fault.

    step: the last committed one before it.
    noticed: seconds until the coordinator heard of it; None where it did not.
    recovered: seconds until the next step was committed; None where none was.
    lost: committed steps that were trained again.
    note: why the fault did not happen, or why nothing came after it.
    """

    fault: Fault
    victim: str
    step: int
    noticed: float | None = None
    recovered: float | None = None
    lost: int = 0
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """How a job is run under faults: `size` nodes, of which at least `least` go on, with `nproc` ranks each.

    assignments: to the job. folder: for everything that is written. tolerance: of losses, relative.
    pace: seconds a step at least; None to choose.
    """

    job: Path
    assignments: tuple[str, ...]
    least: int
    size: int
    nproc: int
    folder: Path
    tolerance: float = 1e-5
    pace: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a schedule."""

    rows: list[Row]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether all faults happened and nothing was lost."""
        return all(each.passed for each in self.checks)


def settle(setting: Setting, schedule: Schedule) -> tuple[Setting, Job]:
    """Returns the setting with what a rehearsal needs of the job, checkpoints and votes, and the job.

    Raises UserError where the faults cannot happen in it.
    """
    job, _ = load_job(setting.job, setting.assignments)
    if job.train.steps is None:
        raise UserError(END_UNKNOWN)
    kinds = {fault.kind for fault in schedule.faults}
    if setting.size == 1 and (several := sorted(kinds.intersection(_SEVERAL))):
        raise UserError(f"{', '.join(several)}: the job would end with its only node. Give --nodes 1:2 or more")
    more = []
    if job.run.save_every == 0:
        more.append(f"run.save_every={max(1, job.train.steps // (4 * len(schedule.faults) + 4))}")
    if kinds.intersection(FLIPS) and job.run.verify_every == 0:
        more.append(f"run.verify_every={_VOTES}")
    return replace(setting, assignments=(*setting.assignments, *more, "run.trackers=[]")), job


def perform(setting: Setting, schedule: Schedule, say: Callable[[str], None]) -> Outcome:
    """Trains the job undisturbed, then with faults; returns what came of it. say: tells a person how far it is.

    Raises UserError for a job or faults that cannot be, LaunchError where the undisturbed run fails.
    """
    setting, job = settle(setting, schedule)
    say(f"the reference: {job.train.steps} steps on {setting.size} node(s) with {setting.nproc} rank(s) each")
    reference, drill = _reference(setting)
    steps, batches = steps_of(reference / "run"), batches_of(read_dealt(drill))
    usual = statistics.median(each.seconds for each in steps)
    pace = chosen_pace(len(steps), usual, schedule) if setting.pace is None else setting.pace
    folder = setting.folder / "faults"
    drill = _drill(folder)
    slowly = Steps(drill, len(steps), pace, usual)
    slowly.until(schedule.faults[0])
    files = Files()
    cluster = _cluster(setting, setting.least, folder, drill)
    with ended(cluster):
        rows, failure = _suffer(cluster, schedule, slowly, say)
        over = not failure and cluster.wait(PATIENCE)
        happened = sum(not row.note for row in rows)
        checks = [
            Check("faults", happened == len(rows), f"{happened} of {len(rows)}"),
            Check("end", over, "the job has ended" if over else failure or "the job does not end"),
        ]
        checks += [check_codes(cluster), check_processes(cluster)] if over else []
    checks.append(files.check(cluster))
    found = steps_of(cluster.run_dir)
    checks += check_losses(found, steps, setting.tolerance)
    checks.append(check_samples(read_dealt(drill), len(steps), batches))
    return Outcome(rows, checks)


def _reference(setting: Setting) -> tuple[Path, Path]:
    """Trains the job undisturbed; returns its folder and that of what its ranks told."""
    folder = setting.folder / "reference"
    drill = _drill(folder)
    cluster = _cluster(setting, setting.size, folder, drill)
    with ended(cluster):
        watch = Watch(cluster)
        try:
            watch.wait(lambda: watch.over, "the reference does not go on")
        except Over:
            raise LaunchError(f"the undisturbed run failed:\n{cluster.nodes[0].said[-2000:]}") from None
        cluster.wait(PATIENCE)
    return folder, drill


def _cluster(setting: Setting, least: int, folder: Path, drill: Path) -> Cluster:
    variables = {VARIABLE: str(drill)}
    cluster = Cluster(setting.job, setting.assignments, (least, setting.size), setting.nproc, folder, variables)
    for _ in range(setting.size - 1):
        cluster.join()
    return cluster


def _drill(folder: Path) -> Path:
    drill = folder / "drill"
    try:
        drill.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} is there already: give another --dir") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}. Give another --dir") from error
    return drill


def _suffer(cluster: Cluster, schedule: Schedule, steps: Steps, say: Callable[[str], None]) -> tuple[list[Row], str]:
    """Has the run suffer the faults, and come to its end; returns what came of each, and why it does not go on."""
    watch = Watch(cluster)
    injector = Injector(cluster, watch, steps.drill, random.Random(schedule.seed))
    rows: list[Row] = []
    try:
        for fault in schedule.faults:
            steps.until(fault)
            _complete(cluster, watch)
            watch.wait(partial(_is_due, watch, fault), "the step of the next fault has not come")
            rows.append(_one(injector, watch, steps, fault, say))
        _complete(cluster, watch)
        steps.to_the_end()
        watch.wait(lambda: watch.over, "the run does not come to its end")
    except Over:
        pass
    except LaunchError as error:
        return [*rows, *_left(schedule, rows, "the run did not go on")], str(error)
    return [*rows, *_left(schedule, rows, "the job was over before")], ""


def _is_due(watch: Watch, fault: Fault) -> bool:
    return watch.step >= fault.step


def _left(schedule: Schedule, rows: list[Row], why: str) -> list[Row]:
    return [Row(fault, "", fault.step, note=why) for fault in schedule.faults[len(rows) :]]


def _complete(cluster: Cluster, watch: Watch) -> None:
    """Has lost nodes come back, and waits until all train; a node that is put aside is not waited for long."""
    for _ in range(cluster.size - len(cluster.living)):
        cluster.join()
    enough = time.monotonic() + _ASIDE
    watch.wait(
        lambda: watch.trains and (watch.nodes >= cluster.size or time.monotonic() > enough), "the nodes do not train"
    )


def _one(injector: Injector, watch: Watch, steps: Steps, fault: Fault, say: Callable[[str], None]) -> Row:
    """Injects a fault and waits for the next step."""
    if fault.kind in LASTING:
        steps.during(fault, watch.step)
    injector.prepare(fault)
    victim = injector.inject(fault)
    since = injector.moment
    say(f"step {since.step}: {fault.kind}, {victim}")
    another = fault.kind not in LASTING
    if fault.kind in LASTING:
        time.sleep(fault.seconds)
    elif fault.kind in _UNSURE:
        deadline = time.time() + _UNSURE_SECONDS
        watch.wait(lambda: watch.noticed(since) is not None or time.time() > deadline, "nothing is noticed")
        another = watch.generation > since.generation or watch.noticed(since) is not None
    watch.wait(lambda: watch.next_step(since, another) is not None, f"no step is committed after {fault.kind}")
    step, noticed = watch.next_step(since, another), watch.noticed(since)
    assert step is not None
    return Row(
        fault,
        victim,
        since.step,
        None if noticed is None else noticed - since.time,
        step.time - since.time,
        watch.lost(since),
        "nobody noticed it" if fault.kind in FLIPS and noticed is None else "",
    )

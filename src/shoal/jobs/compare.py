"""A run beside what the planner predicts of it on this machine, term by term, and what that says of the machine (see
learning)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from shoal.device import any_device, hardware_name
from shoal.errors import UserError
from shoal.jobs.alike import first_alike, first_of_generation
from shoal.jobs.answer import task_of
from shoal.jobs.asking import cluster_of_ranks
from shoal.jobs.choose import Settled, Sizes, microbatches_of, opened
from shoal.jobs.learning import learn_from, spent_on
from shoal.jobs.read import load_job
from shoal.jobs.trials import read as read_trials
from shoal.pipeline.cut import FILE
from shoal.plan import Plan, option_name
from shoal.planner import as_cut
from shoal.planner.cluster import Cluster
from shoal.planner.estimates import Estimates
from shoal.planner.search import search
from shoal.planner.task import NAMES, TERMS, Estimate
from shoal.report.changes import TermsRecord
from shoal.report.levels import MemoryTrace, read_memory_traces
from shoal.report.metrics import RunRecords, read_metrics
from shoal.report.terms import WAITING

STATE = ("weights", "gradients", "masters", "optimizer state", "weights in use", "gradients on loan")
"""Roles that a run counts without a GPU, the last two of them within plan.memory."""
PARTS = tuple(each for each in TERMS if each not in ("compute", "stages"))
SAID = {**NAMES, WAITING: f"{NAMES[WAITING]} and communication"}
NOT_SAMPLED = "no step was sampled"
WHOLE_BLOCKS = (
    "the run's stages are not of whole blocks with the parts around them: predicted of stages of whole blocks"
)


@dataclass(frozen=True)
class Compared:
    """A term: `predicted` and `measured` in `unit`, and why there is no measurement, where there is none."""

    what: str
    unit: str
    predicted: float
    measured: float | None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.measured is None or not self.predicted else self.measured / self.predicted


@dataclass(frozen=True)
class Comparison:
    """All terms of a run, over `steps` of its steps, of which `sampled` say what they were spent on; the assumptions of
    the prediction, and what was `learned` of the machine, or why nothing was."""

    terms: tuple[Compared, ...]
    steps: int
    sampled: int
    said: tuple[str, ...]
    learned: str


def compare(run_dir: Path, keep: bool = True) -> Comparison:
    """Compares the run in `run_dir`, which may still go on; what it says of this machine is kept if `keep` says so.
    Raises UserError for a folder that is no run, a run without a step to compare, or one of another machine."""
    settled, records = _settled(run_dir, read_metrics(run_dir / "metrics.jsonl"))
    steps, sampled = measured_steps(records), sampled_steps(records)
    assert records.run is not None
    cluster = _cluster(settled, records, sampled)
    plan = settled.job.plan
    pins = {each.name: getattr(plan, each.name) for each in fields(Plan)}
    if plan.pipelined:
        pins["stages"] = as_cut(settled.model.factory, plan)
    task = replace(task_of(_as_it_ran(settled), cluster, pins, whole=True), limit=math.inf)
    estimate = search(task).best[0]
    held = [each.device for each in Estimates(task).each(estimate.choice)]
    terms = tuple(_terms(run_dir, records, settled, estimate, held, median(steps), sampled))
    said = (
        learn_from(run_dir, settled, records.run, cluster, estimate, sampled) if keep else "nothing learned, as asked"
    )
    cut = () if not plan.pipelined or pins["stages"] else (WHOLE_BLOCKS,)
    return Comparison(terms, len(steps), len(sampled), (*cluster.said, *cut), said)


def _as_it_ran(settled: Settled) -> Settled:
    """The job with the microbatch of its engine, where it gave none; all rows of a rank at once `task_of` knows as the
    whole."""
    rows, number = microbatches_of(settled.job)
    train = settled.job.train
    return settled if number == 1 else replace(settled, job=replace(settled.job, train=replace(train, microbatch=rows)))


def measured_steps(records: RunRecords) -> list[float]:
    """Seconds of the steps of the run's present world and plan that nothing else was done in: without the first of an
    attempt, a generation or a plan, those with an evaluation or a checkpoint, and those that loss scaling skipped."""
    left = {each.step for each in records.evals} | {each.step for each in records.checkpoints}
    left |= {each + 1 for each in records.resumed} | _skipped(records)
    first = _first(records)
    found = [each.seconds for each in records.steps if each.step not in left and each.step > first]
    if not found:
        raise UserError("the run has no step to compare: the first, those with an evaluation or a checkpoint and those "
                        "that loss scaling skips do not count. Have it train a few others, with run.eval_every and "
                        "run.save_every that leave some")  # fmt: skip
    return found


def sampled_steps(records: RunRecords) -> list[TermsRecord]:
    """What steps of the run's present world and plan were spent on, but for the first of them and
    those that updated nothing."""
    skipped = _skipped(records)
    return [each for each in records.terms if each.step > _first(records) and each.step not in skipped]


def _skipped(records: RunRecords) -> set[int]:
    """The steps that updated nothing, which takes less."""
    return {each.step for each in records.steps if each.skipped}


def _first(records: RunRecords) -> int:
    """The first step of the run's present world and plan."""
    changed = [each.step + 1 for each in records.plans]
    begins = first_of_generation(records) if records.memberships else 0
    return max([records.steps[0].step if records.steps else 0, begins, *changed])


def _settled(run_dir: Path, records: RunRecords) -> tuple[Settled, RunRecords]:
    """The job of a run's resolved.toml, and the records of the steps that were trained as it says."""
    path = run_dir / "resolved.toml"
    if records.run is None or not path.is_file():
        raise UserError(f"{run_dir} has no record of a job: give the directory of a run of `shoal train`")
    if records.servers or records.rounds:
        what = "has a parameter server" if records.servers else "is of `shoal fed`"
        raise UserError(
            f"{run_dir}: the run {what}, and predictions are of ranks that train in step: compare another run"
        )
    job, origins = load_job(path)
    if job.plan.size != records.run.world:
        raise UserError(
            f"{run_dir}: {path.name} has {job.plan.size} ranks, metrics.jsonl {records.run.world}: compare another run"
        )
    if job.plan.pipelined and option_name(job.plan.schedule, "schedule") == FILE:
        raise UserError(f"{run_dir}: its schedule is of a file, of which nothing is predicted: compare another run")
    since = first_alike(records, job)
    if since is None:
        raise UserError(f"{run_dir}: {_why_changed(run_dir, path.name)}")
    steps = tuple(each for each in records.steps if each.step >= since)
    terms = tuple(each for each in records.terms if each.step >= since)
    return opened(job, origins), replace(records, steps=steps, terms=terms)


def _why_changed(run_dir: Path, resolved: str) -> str:
    """Why the last steps of a run are not of the plan in its resolved.toml, and what was measured of those tried."""
    trials = read_trials(run_dir)
    if trials is None or trials.next is None:
        return f"its plan was changed while it ran, so its steps are not of the plan of {resolved}. Compare another run"
    tried = "; ".join(map(str, trials.candidates))
    return (
        f"it ended while plans were tried, so none has stayed whose steps could be compared ({tried}). Train it for "
        "more steps, or compare another run"
    )


def _cluster(settled: Settled, records: RunRecords, sampled: Sequence[TermsRecord]) -> Cluster:
    """This machine with the ranks of the run. Raises UserError if the run was on another."""
    run, device = records.run, any_device()
    assert run is not None
    if run.host != os.uname().nodename:
        raise UserError(
            f"the run was on {run.host}, this is {os.uname().nodename}, of which it says nothing: compare it there"
        )
    name = hardware_name(device)
    if name is not None and name not in run.device:
        raise UserError(f"the run was on {run.device}, this machine has {name}: compare it where it ran")
    hosts = sampled[-1].hosts if sampled else ()
    on_host = run.on_host or settled.job.run.nproc or run.world  # a node that joins has a number of its own
    return cluster_of_ranks(settled, Sizes(run.world, on_host), hosts=hosts)


def _terms(
    run_dir: Path, records: RunRecords, settled: Settled, estimate: Estimate, held: Sequence[Mapping[str, float]],
    seconds: float, sampled: Sequence[TermsRecord],
) -> Iterator[Compared]:  # fmt: skip
    yield Compared("time of a step", "s", estimate.seconds, seconds)
    yield from _parts(estimate, sampled)
    yield _memory(run_dir, records, estimate, held)
    sent = {what for each in sampled for what in each.sent}
    for what in [each for each in TERMS if estimate.wire.get(each) or each in sent]:
        measured = median(each.sent.get(what, 0) for each in sampled) if sampled else None
        why = "" if sampled else NOT_SAMPLED
        yield Compared(f"sent by a rank: {NAMES[what]}", "bytes", estimate.wire.get(what, 0.0), measured, why)
    tokens = median(each.tokens for each in records.steps)
    yield Compared("tokens or samples a second", "1/s", tokens / estimate.seconds, tokens / seconds)
    if settled.total is not None:
        why = _why_no_total(records, settled.total)
        whole = records.end.seconds if records.end is not None and not why else None
        yield Compared("total time", "s", settled.total * estimate.seconds, whole, why)


def _why_no_total(records: RunRecords, total: int) -> str:
    """Why what the run took is not what `total` steps take, "" where it is."""
    steps = len(records.steps)
    if records.attempts > 1 or (steps != total and (records.plans or len(records.memberships) > 1)):
        return "of several attempts or plans"
    if records.end is None:
        return "it has not ended"
    return "" if steps == total else f"it ended after {steps} of {total} steps"


def _parts(estimate: Estimate, sampled: Sequence[TermsRecord]) -> Iterator[Compared]:
    """What a step is spent on: as predicted of the rank that others wait for, and as that one recorded."""
    predicted = dict(estimate.terms)
    predicted[WAITING] = predicted.get(WAITING, 0.0) + predicted.pop("stages", 0.0)
    compute = predicted.pop("compute")
    rows = [
        ("compute", compute, ("forward", "backward")),
        ("compute: forward", estimate.forward, ("forward",)),
        ("compute: backward", compute - estimate.forward, ("backward",)),
        *((SAID[what], predicted.get(what, 0.0), (what,)) for what in PARTS),
    ]
    for what, each, own in rows:
        measured = math.fsum(spent_on(sampled, part) for part in own) if sampled else None
        if each or measured:
            yield Compared(f"time of a step: {what}", "s", each, measured, "" if sampled else NOT_SAMPLED)


def _memory(run_dir: Path, records: RunRecords, estimate: Estimate, held: Sequence[Mapping[str, float]]) -> Compared:
    """The memory of the fullest rank, as far as the run counted it: where it did not count activations, of the rank
    with most beside them. `held`: what is predicted of each by role."""
    what, began = "memory of the fullest rank", records.steps[0].time - records.steps[0].seconds
    traces = [each for each in read_memory_traces(run_dir / "memory.jsonl") if each.at[-1] >= began]
    if not traces:
        return Compared(what, "bytes", estimate.bytes, None, "not recorded")
    if all(each.counts_all for each in traces):
        return Compared(what, "bytes", estimate.bytes, max(each.most for each in traces))
    states = [_state(each) for each in traces]
    counted = {role for each in states for role in each}
    predicted = max(math.fsum(each.get(role, 0.0) for role in counted) for each in held)
    most = max(max(map(sum, zip(*each.values(), strict=True)), default=0) for each in states)
    return Compared(f"{what}: state and weights in use", "bytes", predicted, most)


def _state(trace: MemoryTrace) -> dict[str, list[int]]:
    """The bytes of each role of STATE at each moment: not what a rank keeps of another one for `plan.buddy`."""
    return {role: sizes for role, sizes in next(iter(trace.levels.values())).items() if role in STATE}

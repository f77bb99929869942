"""A run beside what the planner predicts of it on this machine, and what that says of the machine's computing."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from shoal.device import any_device, hardware_name
from shoal.errors import UserError, in_section
from shoal.jobs.answer import task_of
from shoal.jobs.automatic import cluster_of_ranks
from shoal.jobs.choose import Settled, Sizes, opened
from shoal.jobs.read import load_job
from shoal.plan import Plan
from shoal.planner.cluster import Cluster
from shoal.planner.measure import Learned, learn, learned
from shoal.planner.search import search
from shoal.planner.task import Estimate
from shoal.precision import precision
from shoal.report.levels import read_memory_traces
from shoal.report.metrics import RunRecords, read_metrics

FEWEST = 3
"""Steps that a comparison needs at least to learn from."""
STATE = ("weights", "gradients", "masters", "optimizer state", "weights in use")
"""Roles that a run counts without a GPU."""
MOSTLY = 0.8
"""Share of a predicted step that has to be computing, for the rest of a measured one to be told apart."""


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
    """All terms of a run, over `steps` of its steps, the assumptions of the prediction, and what was `learned` of the
    machine, or why nothing was."""

    terms: tuple[Compared, ...]
    steps: int
    said: tuple[str, ...]
    learned: str


def compare(run_dir: Path, keep: bool = True) -> Comparison:
    """Compares the run in `run_dir`, which may still go on; what it says of computing is kept unless `keep` is False.
    Raises UserError for a folder that is no run, a run without a step to compare, or one of another machine."""
    records = read_metrics(run_dir / "metrics.jsonl")
    steps = measured_steps(records)
    settled = _settled(run_dir, records)
    assert records.run is not None
    cluster = _cluster(settled, records)
    pins = {each.name: getattr(settled.job.plan, each.name) for each in fields(Plan)}
    task = replace(task_of(settled, cluster, pins), limit=math.inf)
    estimate = search(task).best[0]
    seconds = median(steps)
    said = _learn(run_dir, settled, cluster, estimate, steps, keep)
    return Comparison(tuple(_terms(run_dir, records, settled, estimate, seconds)), len(steps), cluster.said, said)


def measured_steps(records: RunRecords) -> list[float]:
    """Seconds of the steps of the run's present world and plan that nothing else was done in: without the first of an
    attempt or a plan, and without those with an evaluation or a checkpoint."""
    began = records.steps[0].step if records.steps else 0
    left = {began, *(each + 1 for each in records.resumed)}
    left |= {each.step for each in records.evals} | {each.step for each in records.checkpoints}
    since = records.plans[-1].step + 1 if records.plans else 0
    found = [each.seconds for each in records.steps if each.step not in left and each.step > since]
    if not found:
        raise UserError("the run has no step to compare: the first and those with an evaluation or a checkpoint do not "
                        "count. Wait until it has trained a few more")  # fmt: skip
    return found


def _settled(run_dir: Path, records: RunRecords) -> Settled:
    path = run_dir / "resolved.toml"
    if records.run is None or not path.is_file():
        raise UserError(f"{run_dir} has no record of a job: give the directory of a run of `shoal train`")
    job, origins = load_job(path)
    other = records.plans and records.plans[-1].plan != job.plan.to_dict()  # plans were tried, and one stayed
    if other or any(each.generation > 1 for each in records.memberships):
        raise UserError(
            f"{run_dir}: its plan or ranks changed while it ran, so its steps are not of one plan. Compare another run"
        )
    if job.plan.size != records.run.world:
        raise UserError(
            f"{run_dir}: {path.name} has {job.plan.size} ranks, metrics.jsonl {records.run.world}: compare another run"
        )
    return opened(job, origins)


def _cluster(settled: Settled, records: RunRecords) -> Cluster:
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
    return cluster_of_ranks(settled, Sizes(run.world, settled.job.run.nproc or run.world))


def _terms(
    run_dir: Path, records: RunRecords, settled: Settled, estimate: Estimate, seconds: float
) -> Iterator[Compared]:
    yield Compared("time of a step", "s", estimate.seconds, seconds)
    for what, each in estimate.terms.items():
        if each:
            yield Compared(f"time of a step: {what}", "s", each, None, "not recorded")
    yield _memory(run_dir, estimate)
    for what, each in estimate.wire.items():
        yield Compared(f"sent by a rank: {what}", "bytes", each, None, "not recorded")
    tokens = median(each.tokens for each in records.steps)
    yield Compared("tokens or samples a second", "1/s", tokens / estimate.seconds, tokens / seconds)
    if settled.total is not None:
        ended = records.end is not None and records.attempts == 1 and len(records.steps) == settled.total
        whole = records.end.seconds if records.end is not None and ended else None
        why = "" if ended else "not in one attempt"
        yield Compared("total time", "s", settled.total * estimate.seconds, whole, why)


def _memory(run_dir: Path, estimate: Estimate) -> Compared:
    """The memory of the fullest rank, as far as the run counted it: without activations where it did not."""
    what, traces = "memory of the fullest rank", read_memory_traces(run_dir / "memory.jsonl")
    if not traces:
        return Compared(what, "bytes", estimate.bytes, None, "not recorded")
    fullest = max(traces, key=lambda each: each.most)
    if fullest.counts_all:
        return Compared(what, "bytes", estimate.bytes, fullest.most)
    held = sum(estimate.memory.get(role, 0.0) for role in STATE)
    return Compared(f"{what}: state and weights in use", "bytes", held, fullest.most)


def _learn(
    run_dir: Path, settled: Settled, cluster: Cluster, estimate: Estimate, steps: list[float], keep: bool
) -> str:  # fmt: skip
    """Keeps what the run says of computing, where that can be told apart, and says so, or why not."""
    away = settled.job.plan.memory is not None  # the host updates
    computing = estimate.terms["compute"] + (0.0 if away else estimate.terms["optimizer"])
    rest = estimate.seconds - computing
    took = median(steps) - rest
    if len(steps) < FEWEST:
        return f"nothing learned: {len(steps)} steps to compare, {FEWEST} are needed"
    if computing < MOSTLY * estimate.seconds or took <= 0:
        share = computing / estimate.seconds
        return f"nothing learned: computing is {share:.0%} of the predicted step and cannot be told from the rest"
    if not keep:
        return "nothing learned, as asked"
    with in_section("train"):
        dtype = precision(settled.job.train.precision).model
    device, on_host = any_device(), cluster.hosts[0].count
    before = learned(device, dtype, on_host)
    slower = took / computing * (1.0 if before is None else before.slower)
    found = Learned(slower, str(run_dir.resolve()), time.time())
    learn(device, dtype, on_host, found)
    return f"kept for the next prediction: {found}"

"""The planner's answer for a job: the plan that was chosen, what it takes, the next best ones, and what a dry run of
the ranks that matter says of its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shoal.comm import World
from shoal.errors import UserError, in_section
from shoal.jobs.choose import Settled, under
from shoal.jobs.dry_runs import DryRuns, compared
from shoal.jobs.forecast import Forecast
from shoal.jobs.optimizers import optimizer_named
from shoal.models import build
from shoal.module.selective import selects
from shoal.optim.groups import decay_matrices_only, small_optimizer
from shoal.parallel.tensor import names_blocks
from shoal.plan import Plan
from shoal.planner import SHALLOW, Machine, Prediction, Subject, family
from shoal.planner.ask import check_tokens, legal_degrees, numbers_of
from shoal.planner.cluster import Cluster
from shoal.planner.compiled import keeps_inside, why_not_compiled
from shoal.planner.confirm import confirm
from shoal.planner.degrees import Ways, ways
from shoal.planner.kept_profiles import kept
from shoal.planner.layers import Layers
from shoal.planner.pins import check_traced
from shoal.planner.policies import is_compiled
from shoal.planner.predict import lacking_most
from shoal.planner.prepare import Untraced
from shoal.planner.probe import probe, run_together
from shoal.planner.profile import Profile, deepened, profile
from shoal.planner.repeats import REPEATED
from shoal.planner.search import search
from shoal.planner.task import EXACT, Estimate, Found, Task
from shoal.planner.untraced import check_divided
from shoal.precision import precision

ALONE = Plan()
"""Of one rank."""


@dataclass(frozen=True)
class Chosen:
    """What the planner answers.

    - `job`: the job under the plan; `plan`, `estimate`: the one that was chosen
    - `predictions`: memory of its first, second and last ranks along a pipeline, by dry run
    - `others`: estimates of the others, the next best first, and `passed`: candidates that a dry run refused, each with
      the reason
    - `found`: all of the search; `eager`: why blocks are not compiled, where that would be faster, "" else
    - `layers`: what cutting each layer along tp saves, where the plan has tp
    """

    settled: Settled
    task: Task
    estimate: Estimate
    predictions: tuple[Prediction, ...]
    others: tuple[Estimate, ...]
    passed: tuple[tuple[Estimate, str], ...]
    found: Found
    eager: str = ""
    layers: Layers | None = None

    @property
    def plan(self) -> Plan:
        return self.settled.job.plan

    @property
    def steps(self) -> int:
        """Number of steps of the whole job, which train.seconds may end (see `Settled.steps_of`)."""
        return self.settled.steps_of(self.estimate.seconds)

    @property
    def hours(self) -> float:
        """Hours that the whole job takes."""
        return self.steps * self.estimate.seconds / 3600

    @property
    def price(self) -> float | None:
        """Price of the whole job, in the cluster's currency; None where the cluster has no prices."""
        each = self.task.cluster.price
        return self.hours * each if each else None

    @property
    def bytes(self) -> int:
        """Bytes that the fullest rank takes of its device, by dry run."""
        return max(each.need.total("device") for each in self.predictions)


def subject_of(settled: Settled, table: dict[str, Any] | None = None, plan: Plan = ALONE) -> Subject:
    """The model of a job, or of another `[model]` table with its data, for traces."""
    job, model = settled.job, settled.model if table is None else build(table)
    with in_section("train"):
        numbers = precision(job.train.precision)
    sample = settled.model.prepare_data(settled.data.train)[0]
    groups = decay_matrices_only(job.train.weight_decay)
    return Subject(model.factory, model.loss, sample, 1, numbers, plan, groups)


def profile_of(settled: Settled, ways: Ways, plan: Plan = ALONE) -> Profile:
    """Traces the model of a job, or reads what was traced before. `plan`: with its placements."""
    subject = subject_of(settled, plan=plan)
    return kept(_settings(settled), subject, ways, partial(_traced, settled, subject, ways))


def _settings(settled: Settled) -> object:
    """What a job's model is made by."""
    model = settled.model
    return model.name, settled.job.model.get("loss"), model.values, settled.job.train.weight_decay


def _traced(settled: Settled, subject: Subject, ways: Ways) -> Profile:
    """Traces the model; of one with many equal blocks a shallow one, where that proves to say all."""
    own = shallow_of(settled, subject.plan)
    if own is not None:
        try:
            return deepened(profile(own[0], ways), own[1], REPEATED)
        except UserError:
            pass  # it cannot be as shallow: it is traced whole
    return profile(subject, ways)


def shallow_of(settled: Settled, plan: Plan = ALONE) -> tuple[Subject, int] | None:
    """A model of few blocks that says all of a job's under `plan`, and how many blocks that has; None where there is
    none."""
    table, values = dict(settled.job.model), settled.model.values
    own = family(table, values)
    if own is None or own.depth is None or names_blocks(plan.placements or {}):
        return None
    if values[own.depth] > SHALLOW + 1:
        try:
            few = {**table, own.depth: SHALLOW}
            shallow = subject_of(settled, few, plan)
            if compared(build(few), settled.model, shallow.precision) is not None:
                return shallow, values[own.depth]
        except UserError:
            pass  # the model cannot be as shallow
    return None


def task_of(
    settled: Settled, cluster: Cluster, pins: dict[str, Any], whole: bool = False, limit: float | None = None
) -> Task:
    """What is asked for a job on `cluster`. `whole`: all rows of a rank are one microbatch, unless the job says
    otherwise. Raises UserError for a model that cannot be run, or not divided as it is pinned."""
    job, devices = settled.job, cluster.size
    check_tokens(pins, settled.model.values, job.data.sequence, devices)
    try:
        traced = profile_of(settled, ways(pins, devices), Plan(placements=pins.get("placements")))
    except Untraced:
        check_divided(pins, subject_of(settled))
        raise
    check_traced(pins, traced)
    optimizer = optimizer_named(job.train.optimizer, job.train.lr)
    with in_section("train"):
        numbers = numbers_of(precision(job.train.precision), optimizer)
    legal = legal_degrees(settled.model.values, traced, job.data.sequence, cluster.per_host)
    task = Task(
        traced,
        cluster.telling(numbers.dtype, numbers.rounded),
        _rows(settled, devices),
        numbers,
        _given(settled, whole),
        settled.total,
        pins,
        legal,
        limit,
        exchanges=tuple(dict.fromkeys((EXACT, *job.auto.allow))),
        compiled=not any(device.on_host for device in cluster.devices),
        optimizer=partial(small_optimizer, optimizer, [{}]),
        whole=whole and job.train.microbatch is None,
    )
    return probe(subject_of(settled), task, _settings(settled))


def ran_together(settled: Settled, world: World, whole: bool) -> None:
    """Has the ranks run a small model, of which `task_of` then knows what it takes there. A collective call. `whole`:
    see there."""
    rows, given = _rows(settled, world.size), _given(settled, whole)
    run_together(world, subject_of(settled), rows, given, _settings(settled))


def _rows(settled: Settled, ranks: int) -> int:
    """Rows of a step: all that there are where a batch would have more, but one for each rank as far as it has them."""
    batch = settled.job.train.global_batch
    return max(min(len(settled.data.train), batch), min(ranks, batch))


def _given(settled: Settled, whole: bool) -> int | None:
    """The microbatch, where it is not the planner's to choose."""
    train = settled.job.train
    return train.microbatch or (train.global_batch if whole else None)


def searched(settled: Settled, task: Task) -> tuple[Task, Found, str]:
    """Searches; without compiled blocks, where those that it would have compiled cannot be, and without what these
    would keep of some operations, where they cannot. Returns the task that was searched, what was found, and why blocks
    are not compiled."""
    found, eager = search(task), ""
    if not any(is_compiled(task, each.choice) for each in found.best):
        return task, found, eager
    shallow = shallow_of(settled)
    subject = subject_of(settled) if shallow is None else shallow[0]
    if "compile" not in task.pins and (eager := why_not_compiled(subject)):
        task = replace(task, compiled=False)
        return task, search(task), eager
    of_operations = any(selects(each.choice.recompute) for each in found.best)
    if of_operations and not keeps_inside(subject, task.pins):
        task = replace(task, selective=False)
        found = search(task)
    return task, found, eager


def looks(settled: Settled) -> Callable[[Task, Estimate], tuple[tuple[Settled, tuple[Prediction, ...]], str]]:
    """Makes what runs candidates dry, and returns the job under the plan of one and the memory of its ranks, and why it
    does not go, for `confirm`. What candidates have in common is run once."""
    runs: DryRuns | None = None

    def look(task: Task, estimate: Estimate) -> tuple[tuple[Settled, tuple[Prediction, ...]], str]:
        rows = estimate.choice.microbatch if task.microbatch is None else None
        own = under(settled, estimate.choice.plan(task.pins), rows)
        nonlocal runs
        forecast = forecast_of(own, task, runs)
        runs = forecast.runs
        predictions = tuple(forecast.of(own.job.plan, estimate.places))
        return (own, predictions), lacking_most(predictions, task.usable)

    return look


def confirmed(settled: Settled, task: Task) -> Chosen:
    """Searches, and runs candidates dry, the fastest first, until one is found legal and to fit."""
    task, found, eager = searched(settled, task)
    got = confirm(task, found, looks(settled))
    own, predictions = got.looked
    return Chosen(own, got.task, got.estimate, predictions, got.others, got.passed, found, eager)


def forecast_of(settled: Settled, task: Task, known: DryRuns | None = None) -> Forecast:
    """Predictions of memory for a job on the machine of a task. `known`: dry runs of the same job under other plans."""
    cluster, plan = task.cluster, settled.job.plan
    on_host = cluster.hosts[0].device.on_host
    memory = min(host.memory for host in cluster.hosts)
    ranks = min(cluster.per_host, plan.size)
    machine = Machine(memory, None if on_host else cluster.memory, ranks, cluster.is_here)
    return Forecast(settled, machine, 0, known)

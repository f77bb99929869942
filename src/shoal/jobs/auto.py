"""Asks the planner for the plan of a job file: on a machine that is named or described, or on this one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import UserError
from shoal.jobs.answer import Chosen, looks, searched, task_of
from shoal.jobs.asking import check_experts, cluster_of_ranks, keeps_microbatch, task_here
from shoal.jobs.automatic import pinned
from shoal.jobs.choose import Settled, Sizes, opened
from shoal.jobs.placed import placed
from shoal.jobs.ranks import ranks_here
from shoal.jobs.read import allowed, load_job, plan_pins
from shoal.plan import Plan
from shoal.planner.cluster_file import cluster_of
from shoal.planner.explain import TooDear, within_budget
from shoal.planner.least import enough
from shoal.planner.machines import BETWEEN, MACHINES
from shoal.planner.no_degrees import NoDegrees
from shoal.planner.no_room import NoRoom, more_room
from shoal.planner.pins import check_machine, check_pins
from shoal.planner.replicable import as_replicable
from shoal.planner.task import Task
from shoal.toml import plan_text


@dataclass(frozen=True)
class Asked:
    """What the planner is asked beside the job: the machine (see `cluster_of`), fields of the plan that are given
    ("tp=8"), what the whole job may cost and in which currency ("": the machine's), bytes that a rank may use of its
    device, and exchanges that may be taken beside the exact one and those that the job allows."""

    on: str
    pins: Sequence[str] = ()
    budget: float | None = None
    currency: str = ""
    limit: float | None = None
    allow: Sequence[str] = ()


def ask(path: Path, assignments: Sequence[str], asked: Asked) -> Chosen:
    """Finds the plan of the job file `path`. What its [plan] gives is pinned, as by `--pin`. Raises UserError where
    nothing is legal or fits."""
    job, origins = load_job(path, assignments)
    given, more = pinned(job, origins), plan_pins(asked.pins)
    _check_once(given, more)
    pins = {**given, **more}
    check_pins(pins)
    auto = replace(job.auto, allow=(*job.auto.allow, *allowed(asked.allow, "--allow")))
    cluster = None if asked.on == HERE else cluster_of(asked.on, MACHINES, BETWEEN)
    check_machine(pins, ranks_here(job) if cluster is None else cluster.size)
    settled = opened(replace(job, plan=Plan(), auto=auto), origins)
    check_experts(settled)
    if cluster is None:
        cluster = cluster_of_ranks(settled, Sizes(ranks_here(job), ranks_here(job)))
        task = task_here(settled, cluster, pins, asked.limit)
    else:
        task = task_of(settled, cluster, pins, keeps_microbatch(settled), asked.limit)

    def find(task: Task) -> Chosen:
        try:
            if asked.budget is None:
                return placed(settled, task)
            return _within(asked.budget, asked.currency, settled, task)
        except NoRoom as error:
            if asked.limit is None:
                raise
            raise NoRoom(error.said, more_room(task, enough(task, looks(settled)))) from error
        except NoDegrees as error:
            if not given:
                raise
            raise UserError(f"{error}; or leave all that [plan] gives to the planner: --set plan=auto") from error

    return as_replicable(task, settled.job.train.buffers, find)


def _check_once(given: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Raises UserError where a field that `--pin` gives has another value in the job."""
    for field, value in more.items():
        if field in given and _plain(given[field]) != _plain(value):
            raise UserError(
                f"--pin {plan_text({field: value})} and {plan_text({field: given[field]})} of the job are two values: "
                "give one, or leave all that [plan] gives to the planner: --set plan=auto"
            )


def _plain(value: Any) -> Any:
    """A value of a plan however it is spelled."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return value["name"] if value.keys() == {"name"} else {key: _plain(each) for key, each in value.items()}
    return value


def _within(budget: float, currency: str, settled: Settled, task: Task) -> Chosen:
    """The fastest plan whose price keeps to `budget`, confirmed: on another number of hosts where dry runs pass over so
    many that a dearer one is left. Raises UserError with the least price where there is none, which is confirmed too,
    so that as much is enough."""
    known, eager, unfit = dict[int, float](), "", None
    with suppress(UserError):  # all hosts may be too many
        task, _, eager = searched(settled, task)
    while True:
        try:
            part = within_budget(
                task, budget, lambda each: settled.steps_of(each.seconds) * each.seconds, currency, known
            )
        except TooDear as error:
            if error.cheapest is None:
                if unfit is not None and min(known.values()) == math.inf:
                    raise unfit from error
                raise
            part = error.cheapest
        try:
            chosen = placed(settled, part)
        except UserError as error:  # on so many hosts no plan holds in a dry run
            known[len(part.cluster.hosts)], unfit = math.inf, error
            continue
        if (price := chosen.price or 0.0) <= budget:
            return replace(chosen, eager=chosen.eager or eager)
        known[len(part.cluster.hosts)] = price


HERE = "here"

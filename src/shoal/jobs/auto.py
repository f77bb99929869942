"""Asks the planner for the plan of a job file: on a machine that is named or described, or on this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.jobs.answer import Chosen, confirmed, task_of
from shoal.jobs.choose import opened
from shoal.jobs.config import Job
from shoal.jobs.read import load_job, plan_assignments
from shoal.plan import Plan
from shoal.planner.cluster import Cluster, cluster_of
from shoal.planner.explain import within_budget
from shoal.planner.machines import BETWEEN, MACHINES


@dataclass(frozen=True)
class Asked:
    """What the planner is asked beside the job: the machine (see `cluster_of`), fields of the plan that are given
    ("tp=8"), what the whole job may cost, and bytes that a rank may use of its device."""

    on: str
    pins: Sequence[str] = ()
    budget: float | None = None
    limit: float | None = None


def ask(path: Path, assignments: Sequence[str], asked: Asked) -> Chosen:
    """Finds the plan of the job file `path`. What its [plan] gives is pinned, as by `--pin`. Raises UserError where
    nothing is legal or fits."""
    job, origins = load_job(path, assignments)
    pins = {**pinned(job, origins), **plan_assignments([f"plan.{each}" for each in asked.pins])}
    cluster = named(asked.on)
    settled = opened(replace(job, plan=Plan()), origins)
    task = task_of(settled, cluster, pins, asked.limit)
    if asked.budget is not None:
        steps = settled.total or 1
        task = within_budget(task, asked.budget, lambda estimate: steps * estimate.seconds)
    return confirmed(settled, task)


def pinned(job: Job, origins: Any) -> dict[str, Any]:
    """The fields of the plan that a job gives."""
    return {
        key.removeprefix("plan."): getattr(job.plan, key.removeprefix("plan."))
        for key, origin in origins.items()
        if key.startswith("plan.") and origin in ("file", "cli")
    }


def named(text: str) -> Cluster:
    """The machine that is called or described so."""
    return cluster_of(text, MACHINES, BETWEEN)

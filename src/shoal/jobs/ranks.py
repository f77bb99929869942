"""The ranks of a job on this host, and its plan for them. Nothing here imports more of torch than devices need."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import fields
from typing import Any

from shoal.device import accelerators
from shoal.errors import UserError
from shoal.jobs.config import Job, Origins, put
from shoal.jobs.plans import ROWS, check_plans
from shoal.launch.process import usable_cores
from shoal.mesh import Mesh
from shoal.plan import AUTO, Plan
from shoal.toml import toml_value

ASKED = f"plan.name={AUTO}"
"""Among the assignments of a generation: the planner is asked around the others."""


def ranks_here(job: Job) -> int:
    """Returns the number of ranks to start on this host: the job's, else the plan's size, else `default_ranks`."""
    if job.run.nproc is not None:
        return job.run.nproc
    return job.plan.size if job.plan.size > 1 else default_ranks()


def default_ranks() -> int:
    """Returns one rank for each GPU; without GPUs one for each core but at most two, which leaves a laptop usable."""
    return len(accelerators()) or min(2, usable_cores())


def fitted(job: Job, size: int, change: Mapping[str, Any] | None = None) -> tuple[list[str], str]:
    """Returns assignments that give the job's plan, with the fields of `change` (see plans.kept), so many ranks, and
    what they change beside data parallelism because of the ranks, as a sentence; "" where nothing else changes. Raises
    UserError for a job or plan that cannot follow its ranks."""
    if job.run.at:
        raise UserError("run.at with --nodes: a world that changes by itself has no plan by step. Leave out run.at")
    asks = (job.auto.wanted or job.auto.open) and not change  # the ranks of each generation find their plan
    if asks and size % job.plan.size == 0:
        return [], ""
    rows = (change or {}).get(ROWS)
    change = {key: value for key, value in (change or {}).items() if key not in ("dp", ROWS)}
    asked = job.plan.changed(change, size) if change else job.plan
    plan = asked.fitted(size)
    others = {name: getattr(plan, name) for name in _differing(plan, job.plan)}
    if "stages" in others and others["stages"] is None:
        raise UserError(
            f"{size} ranks need a pipeline of other stages than plan.stages = {job.plan.stages}: leave out plan.stages"
        )
    if ended := [name for name, value in others.items() if value is None]:
        raise UserError(f"plan.{ended[0]} of the job file cannot be taken away for later generations")
    names = _differing(plan, asked)
    written = [f"plan.{name}={getattr(plan, name)}" for name in names]
    each = asked.size // asked.dp
    said = f"{size} ranks are no multiple of {each}, so this generation has {', '.join(written)}" if written else ""
    args = [f"plan.{name}={toml_value(value)}" for name, value in others.items()]
    if asks:
        return [ASKED, *([] if job.plan.dp == 1 else [f"plan.dp={plan.dp}"]), *args], said
    return [f"plan.dp={plan.dp}", *args, *([] if rows is None else [f"train.microbatch={rows}"])], said


def _differing(plan: Plan, other: Plan) -> list[str]:
    """Returns the fields in which plans differ, without dp."""
    return [
        each.name
        for each in fields(plan)
        if each.name != "dp" and getattr(plan, each.name) != getattr(other, each.name)
    ]


def spread(job: Job, origins: Origins, size: int) -> tuple[Job, Origins]:
    """Returns the job for `size` ranks, data parallel unless the plan says otherwise, and its origins. Where the
    planner is asked, what is given of a plan may leave other degrees of these ranks to it.

    Raises UserError where the plan needs another number of ranks.
    """
    divides = size % job.plan.size == 0
    completed = job.auto.wanted and divides
    if "plan.dp" not in origins and job.plan.dp == 1 and divides:
        with suppress(UserError) if completed else nullcontext():  # shares are of a dp that the planner finds
            job, origins = put(job, origins, "plan", dp=size // job.plan.size)
    if not completed:
        Mesh(job.plan, 0, size)  # refuses a plan that does not fit
    check_plans(job, size)
    return job, origins

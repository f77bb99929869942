"""The ranks of a job on this host, and its plan for them. Nothing here imports more of torch than devices need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import fields, replace
from typing import Any

from shoal.device import accelerators
from shoal.errors import UserError
from shoal.jobs.config import Job, Origins, put
from shoal.jobs.plans import ROWS, check_plans
from shoal.launch.process import usable_cores
from shoal.mesh import Mesh
from shoal.plan import AUTO, NONE, Plan
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
    rows = (change or {}).get(ROWS)
    change = {key: value for key, value in (change or {}).items() if key not in ("dp", ROWS)}
    given = job.plan
    if asks and given.shard and not given.zero:
        given = replace(given, zero=3)  # which the planner chooses
    asked = _changed(given, change, size) if change else given
    plan = asked.fitted(size)
    others = _differing(plan, given)
    if asks and _leaves_room(given, size, others):
        return [], ""
    names = _differing(plan, asked)
    args = [f"plan.{name}={_written(plan, name)}" for name in others]
    said = _said(asked, plan, size, names) if names else ""
    if asks:
        return [ASKED, *([] if job.plan.dp == 1 else [f"plan.dp={plan.dp}"]), *args], said
    return [f"plan.dp={plan.dp}", *args, *([] if rows is None else [f"train.microbatch={rows}"])], said


def _changed(plan: Plan, change: Mapping[str, Any], size: int) -> Plan:
    """Returns a plan with the fields of `change` for so many ranks, or for fewer replicas than these leave where it
    could not have so many of them."""
    for dp in ({}, *({"dp": each} for each in range(1, size + 1))):
        with suppress(UserError):
            return plan.changed({**dp, **change}, size)
    return plan.changed(change, size)


def _leaves_room(plan: Plan, size: int, others: Sequence[str]) -> bool:
    """Whether what is given of a plan goes with so many ranks, and the planner finds the rest. `others`: what would
    change of it beside dp if all other ranks were replicas."""
    if size % plan.size or plan.dp > 1:
        return not size % plan.size
    return not {*others} - {"shares"} and not size // plan.size % (len(plan.shares) or 1)


def _said(asked: Plan, plan: Plan, size: int, names: Sequence[str]) -> str:
    """Says which fields of a plan so many ranks change."""
    each, now = asked.size // asked.dp, ", ".join(f"plan.{name}={_written(plan, name)}" for name in names)
    before = ", ".join(f"plan.{name}={_written(asked, name)}" for name in names)
    ranks, are = ("1 rank", "is") if size == 1 else (f"{size} ranks", "are")
    why = f"{ranks} {are} no multiple of {each}" if size % each else f"{ranks} cannot have {before}"
    return f"{why}, so this generation has {now}"


def _written(plan: Plan, name: str) -> str:
    """A field as an assignment has it."""
    value = getattr(plan, name)
    return NONE if value is None else toml_value(value)


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

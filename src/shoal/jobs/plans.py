"""The plan of a job at each of its steps: that of `[plan]`, with the changes of `[[run.at]]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from shoal.errors import UserError, did_you_mean
from shoal.jobs.config import Job
from shoal.mesh import Mesh
from shoal.plan import Plan


def changed(plan: Plan, change: Mapping[str, Any], ranks: int) -> Plan:
    """Returns `plan` with the fields of `change`. Without dp among them, that is what the other degrees leave of the
    ranks. Raises UserError for an unknown field, and where the plan needs another number of ranks."""
    known = [field.name for field in fields(Plan)]
    for key in change:
        if key not in known:
            raise UserError(f'plan has no field "{key}".{did_you_mean(key, known)} Fields: {", ".join(known)}')
    given = {"dp": 1, **change}
    if plan.shard is not None and given.get("zero") == 0:
        given.setdefault("shard", None)
    if given.get("pp") == 1:
        given.setdefault("stages", None)
    if "dp" not in change:
        given["dp"] = max(1, ranks // replace(plan, **(given | {"ep": 1, "shard": None})).size)
    new = replace(plan, **given)
    Mesh(new, 0, ranks)  # refuses a plan that does not fit
    return new


def plan_at(job: Job, step: int, ranks: int) -> Plan:
    """Returns the plan after `step` steps."""
    plan = job.plan
    for change in job.run.at:
        if change["step"] <= step:
            plan = changed(plan, change["plan"], ranks)
    return plan


def check_plans(job: Job, ranks: int) -> None:
    """Raises UserError, naming the step, for a change that does not fit the plan before it and the ranks."""
    for change in job.run.at:
        try:
            plan_at(job, change["step"], ranks)
        except UserError as error:
            raise UserError(f"run.at, step {change['step']}: {error}") from None

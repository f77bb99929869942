"""The plan of a job at each of its steps: that of `[plan]`, with the changes of `[[run.at]]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import UserError
from shoal.jobs.config import Job
from shoal.mesh import Mesh
from shoal.plan import Plan


def changed(plan: Plan, change: Mapping[str, Any], ranks: int) -> Plan:
    """Returns `plan` with the fields of `change` (see Plan.changed). Raises UserError where it then needs another
    number of ranks."""
    new = plan.changed(change, ranks)
    Mesh(new, 0, ranks)  # refuses a plan that does not fit
    return new


def plan_at(job: Job, step: int, ranks: int) -> Plan:
    """Returns the plan after `step` steps."""
    plan = job.plan
    for change in job.run.at:
        if change["step"] <= step:
            plan = changed(plan, change["plan"], ranks)
    return plan


def plans_of(job: Job, ranks: int) -> list[Plan]:
    """Returns all plans of a job, in the order of its steps."""
    return [job.plan, *(plan_at(job, change["step"], ranks) for change in job.run.at)]


def check_plans(job: Job, ranks: int) -> None:
    """Raises UserError, naming the step, for a change that does not fit the plan before it and the ranks."""
    for change in job.run.at:
        try:
            plan_at(job, change["step"], ranks)
        except UserError as error:
            raise UserError(f"run.at, step {change['step']}: {error}") from None

"""The plan of a job at each of its steps: that of `[plan]`, with the changes of `[[run.at]]`. What `shoal replan` has
changed where nodes come and go is kept in the run's directory, for the generations that follow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.errors import UserError
from shoal.jobs.config import Job
from shoal.mesh import Mesh
from shoal.plan import NONE, Plan
from shoal.replace import replace_text

KEPT = "replanned.json"
"""In the run's directory: the fields of the plan that were changed, and ROWS."""
ROWS = "microbatch"
"""Among what is kept: the microbatch that the planner chose for the plan that was changed."""


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


def whole(plan: Plan) -> dict[str, Any]:
    """Returns the change that leads to `plan` from any other one, but for shares, which follow the ranks."""
    values = {each.name: getattr(plan, each.name) for each in fields(plan) if each.name != "shares"}
    return {name: NONE if value is None else value for name, value in values.items()}


def keep(run_dir: Path, change: Mapping[str, Any]) -> None:
    """Adds to what is kept of the run's plan."""
    replace_text(run_dir / KEPT, json.dumps({**kept(run_dir), **change}))


def kept(run_dir: Path) -> dict[str, Any]:
    """Returns the changes of the run's plan that are kept, none where there is no such file."""
    with suppress(FileNotFoundError):
        found = json.loads((run_dir / KEPT).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def forget(run_dir: Path) -> None:
    """Ends what is kept: another run begins here, or this one is over."""
    with suppress(FileNotFoundError, NotADirectoryError):
        (run_dir / KEPT).unlink()

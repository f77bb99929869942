"""Which steps of a run were trained as its resolved.toml says: a run that is started again may have been given another
plan, other ranks, or other samples in a step."""

from __future__ import annotations

import math
from typing import Any

from shoal.jobs.config import Job
from shoal.jobs.plans import plan_at
from shoal.report.metrics import RunRecord, RunRecords

SAME_SECONDS = ("steps", "epochs", "seconds", "lr", "weight_decay", "schedule", "warmup", "clip", "seed")
"""Keys of [train] that change nothing of what a step takes."""


def first_alike(records: RunRecords, job: Job) -> int | None:
    """Returns the first step of those at the run's end that were trained as `job` says, its plan included, on the ranks
    and versions of the last attempt. It comes after the last step where the last attempts have trained none. None
    where the plan was changed to another one in the last attempt that trained."""
    assert records.run is not None
    plan, since = job.plan.to_dict(), math.inf
    floor = first_of_generation(records)
    for run, begun in reversed(records.begun):
        first = max(begun, floor)
        if run is None or first >= since:
            continue  # another attempt has trained all of its steps again
        changes = [each for each in records.plans if first <= each.step < since]
        if _job_of(run) != _job_of(records.run):
            break
        begins = plan_at(job, first - 1, run.world).to_dict() if _plan_of(run) == _plan_of(records.run) else None
        if (changes[-1].plan if changes else begins) != plan:
            if since == math.inf and (changes or begins is not None):
                return None
            break
        since = changes[-1].step + 1 if changes else first
        if changes:
            break  # what was trained before is of other plans
    if since == math.inf:
        return max((each.step for each in records.steps), default=0) + 1
    return int(since)


def first_of_generation(records: RunRecords) -> int:
    """Returns the first step of the last generation that has trained, 1 where nodes do not come and go. One before it
    may have begun later: it was gone back from."""
    last = max((each.step for each in records.steps), default=0)
    began = [each.step for each in records.memberships if each.step < last]
    return 1 + (began[-1] if began else 0)


def _job_of(run: RunRecord) -> list[Any]:
    """What an attempt has trained, where, and by what, but for its plan."""
    left_out = {f"train.{key}" for key in SAME_SECONDS}
    of = {key: each["value"] for key, each in run.config.items() if key.startswith(("model.", "data.", "train."))}
    job = {key: value for key, value in of.items() if key not in left_out}
    return [job, run.host, run.device, run.world, run.versions, run.threads]


def _plan_of(run: RunRecord) -> dict[str, Any]:
    """The plan that an attempt was given, with its changes by step."""
    return {key: each["value"] for key, each in run.config.items() if key.startswith("plan.") or key == "run.at"}

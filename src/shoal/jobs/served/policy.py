"""The policy of a job, and the samples of a ticket."""

from __future__ import annotations

from typing import Any

from shoal.data import Cursor
from shoal.data.cursor import share_start
from shoal.jobs.config import Job
from shoal.jobs.served.table import ASYNC, BATCH, STALENESS, SYNC
from shoal.server import Async, Batch, BoundedStaleness, Sync
from shoal.server.policies import Policy


def policy_of(job: Job, workers: int) -> Policy:
    """Returns the policy that `[server]` names."""
    kind, number = job.server.kind
    given: dict[str, Any] = {"scale": job.server.scale or "none", "drop_above": job.server.drop_above}
    if kind == SYNC:
        return Sync(workers)
    if kind == BATCH:
        return Batch(number, **given)
    if kind == STALENESS:
        return BoundedStaleness(number, **given)
    assert kind == ASYNC
    return Async(**given)


def samples_of(cursor: Cursor, ticket: int, number: int) -> tuple[int, tuple[int, ...]]:
    """Returns the step of a ticket, and its samples: one of `number` shares of the step's global batch."""
    step, share = divmod(ticket, number)
    ids = cursor.ids(step)
    some = ids[share_start(len(ids), share, number) : share_start(len(ids), share + 1, number)]
    return step, tuple(some.tolist())

"""Whether several replicas can keep the buffers of a model as one process would."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import UserError
from shoal.module.buffers import OtherBuffers
from shoal.module.build import build_blank
from shoal.plan import Plan
from shoal.planner.degrees import PINS
from shoal.planner.dry_run import loss_of
from shoal.planner.prepare import Subject, in_one_line, prepared
from shoal.planner.task import Task


def why_one_replica(subject: Subject, ranks: int) -> str:
    """Why `ranks` replicas of the model cannot keep its buffers as one process would (their values decide what a
    forward computes, as those of spectral_norm do), from a forward on fake tensors; "" if they can."""
    if ranks == 1:
        return ""
    subject = replace(subject, plan=Plan(), rank=0)
    with in_one_line(), prepared(build_blank(subject.factory), subject) as ready:
        buffers = OtherBuffers(ready.local.module, ranks, averages=False, whole_shares="")
        with buffers.watching() as passed:
            passed(loss_of(ready, subject))
        try:
            buffers.agree([buffers.rules], ranks, streams=1)
        except UserError as error:
            return str(error)
    return ""


def of_one_replica(task: Task, why: str) -> Task:
    """The task without replicas. Raises UserError, with `why`, where there are several as it is pinned."""
    copies = {field: 1 for field, what in PINS.items() if what in ("copies", "tokens")}
    if any(task.pins.get(field, 1) != 1 for field in copies):
        raise UserError(why)
    return replace(task, pins={**task.pins, **copies})

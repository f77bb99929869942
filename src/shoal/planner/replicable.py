"""Asks the planner about a model whose buffers not all replicas, or no stages, can keep as one process would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from shoal.errors import UserError
from shoal.planner.degrees import PINS
from shoal.planner.policies import all_run_again
from shoal.planner.task import Task

Answer = TypeVar("Answer")


def not_kept(task: Task, buffers: str) -> dict[str, str]:
    """Why replicas, or stages, cannot keep the model's buffers, by what they divide: of those that there could be, and
    cannot. `buffers`: "exact" or "averaged", as for Engine. Stages can where all blocks run again, or are graphs, which
    keep what they read."""
    if task.cluster.size == 1:
        return {}
    averaged = buffers != "exact"
    kept = all_run_again(task) or bool(task.pins.get("compile"))
    can = {"copies": averaged, "tokens": averaged, "stages": kept}
    return {what: why for what, why in task.profile.buffers.items() if why and not can[what]}


def as_replicable(task: Task, buffers: str, find: Callable[[Task], Answer]) -> Answer:
    """Returns what `find` gives for the task without the replicas that cannot keep the model's buffers (see
    `not_kept`). Raises UserError, with the reason, where such replicas are pinned, or nothing else is found."""
    whys = not_kept(task, buffers)
    fields = {field: whys[what] for field, what in PINS.items() if what in whys}
    for field, why in fields.items():
        if task.pins.get(field, 1) != 1:
            raise UserError(why)
    try:
        pins, legal = {**task.pins, **dict.fromkeys(fields, 1)}, {**task.legal, **dict.fromkeys(whys, 1)}
        return find(replace(task, pins=pins, legal=legal))
    except UserError as error:
        if "copies" not in whys:
            raise
        raise UserError(f"{whys['copies']}. Without replicas: {error}") from error

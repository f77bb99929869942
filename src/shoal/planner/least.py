"""The plan that needs least of a device, and how much of one is confirmed to be enough for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal import units
from shoal.errors import UserError
from shoal.plan import nbytes
from shoal.planner.search import Search
from shoal.planner.task import Choice, Estimate, Task

NOTHING = 1.0
"""Bytes of a device in which no plan fits."""
GROWTH, TRIES = 1.05, 16
"""From one size of a device that is tried to the next, and how many are: dry runs count up to twice the estimate."""


def needing_least(task: Task) -> Estimate | None:
    """What needs least of a device, however long it takes, where the device has next to nothing; None where no choice
    is legal. Whether blocks are compiled changes no memory that is counted."""
    return Search(replace(task, limit=NOTHING, share=1.0, compiled=False)).run().nearest


def in_full(task: Task, choice: Choice) -> Estimate | None:
    """The choice that `needing_least` has found, where ranks may use all that `task` says; None where it does not fit.
    It computes again what it did there, and what lies on its device is limited by what there is."""
    away = choice.offload
    if away is not None and away.device == NOTHING:
        away = away._replace(device=task.usable)
    search = Search(replace(task, share=1.0, compiled=False, pins={**task.pins, "recompute": choice.recompute}))
    begun = search.looked(choice._replace(recompute="none", stages=(), shares=(), offload=away))
    return search.simulated(search.finished(begun)) if search.fits(begun.choice, begun.fullest) else None


def enough(task: Task, look: Callable[[Task, Estimate], tuple[object, str]]) -> str:
    """The `--device` with which a plan is found and confirmed, within a twentieth of the least; "" where there is none
    of which the machine's devices have as much. `look`: as for `confirm`."""
    near = needing_least(task)
    if near is None:
        return ""
    on_host = any(device.on_host for device in task.cluster.devices)  # one memory
    limit = near.bytes + (near.on_host if on_host else 0.0)
    for _ in range(TRIES):
        said = units.enough(limit).replace(" ", "")
        asked = replace(task, limit=float(nbytes(said, "--device")), share=1.0)
        if asked.usable > task.cluster.memory:
            return ""
        if (estimate := in_full(asked, near.choice)) is not None:
            try:
                why = look(asked, estimate)[1]
            except UserError:  # it is not for want of memory
                return ""
            if not why:
                return said
        limit *= GROWTH
    return ""

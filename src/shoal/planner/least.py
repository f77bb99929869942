"""The plan that needs least of a device, and how much of one is confirmed to be enough for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from shoal import units
from shoal.errors import UserError
from shoal.plan import nbytes
from shoal.planner.search import Search
from shoal.planner.task import Choice, Estimate, Task

NOTHING = 1.0
"""Bytes of a device in which no plan fits."""
NEAR = 1.05
"""How much larger than the least what is said to be enough may be."""
GROWTH = (*(NEAR,) * 6, 1.1, 1.25, 1.5, 2.0, 2.0, 4.0, 4.0)
"""From one size of a device that is tried to the next: dry runs count more than the estimate, of small models many
times as much. Sizes between the last two are tried where these are farther apart."""


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
    begun = search.looked(choice._replace(recompute="none", shares=(), offload=away))
    return search.simulated(search.finished(begun)) if search.fits(begun.choice, begun.fullest) else None


def enough(task: Task, look: Callable[[Task, Estimate], tuple[object, str]]) -> str:
    """The `--device` with which a plan is found and confirmed, within a twentieth of the least; "" where there is none
    of which the machine's devices have as much. `look`: as for `confirm`."""
    near = needing_least(task)
    if near is None:
        return ""
    on_host = any(device.on_host for device in task.cluster.devices)  # one memory
    high = near.bytes + (near.on_host if on_host else 0.0)
    low, growth = high, iter(GROWTH)
    try:
        while not (said := _holds(task, near.choice, min(high, task.cluster.memory), look)):
            if high >= task.cluster.memory:
                return ""
            low, high = high, high * next(growth)
    except (UserError, StopIteration):  # it is not for want of memory
        return ""
    with suppress(UserError):  # nor is it here
        while high > NEAR * low:
            middle = math.sqrt(low * high)
            if between := _holds(task, near.choice, middle, look):
                high, said = middle, between
            else:
                low = middle
    return said


def _holds(task: Task, choice: Choice, limit: float, look: Callable[[Task, Estimate], tuple[object, str]]) -> str:
    """The least that is written of a device with about so many bytes, if the choice is confirmed in them; else ""."""
    said = units.enough(limit).replace(" ", "")
    asked = replace(task, limit=float(nbytes(said, "--device")), share=1.0)
    if asked.usable > task.cluster.memory or (estimate := in_full(asked, choice)) is None:
        return ""
    return "" if look(asked, estimate)[1] else said

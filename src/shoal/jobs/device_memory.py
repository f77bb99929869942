"""Refuses a plan whose budget of the device's memory is too small for a step, before a run goes to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from shoal.chunks import budget
from shoal.comm import World
from shoal.comm.first import from_first
from shoal.errors import UserError
from shoal.jobs.choose import Settled
from shoal.jobs.forecast import Forecast
from shoal.jobs.plan import machine_here
from shoal.planner import BUDGET
from shoal.planner.prepare import Untraced


def check_device_memory(settled: Settled, world: World) -> None:
    """Raises UserError, on all ranks alike, where plan.memory.device is less than `shoal plan --memory` says that the
    plan needs. A collective call: rank 0 predicts."""
    plan = settled.job.plan
    allowed = None if plan.memory == "auto" else budget(plan.memory, torch.device("cpu"))
    if allowed is None or allowed.device is None:
        return

    # a GPU that measures where updates are faster need not take the way that needs more of it
    sure = plan.memory
    if isinstance(sure, Mapping) and allowed.update == "auto":
        sure = {**sure, "update": "deferred"}

    def find() -> list[int] | None:
        forecast = Forecast(settled, machine_here(world.on_host), process=0)
        try:
            found = forecast.predict(replace(plan, memory=sure))
        except Untraced:  # values decide what it takes: the first step shows whether the budget is enough
            return None
        return next(([fit.needed, fit.available] for fit in found.fits if fit.memory == BUDGET), None)

    told = from_first(world.everyone, find)
    if told is not None and told[0] > told[1]:
        raise UserError(
            f"plan.memory.device = {told[1]:,} bytes: a step needs {told[0]:,}, as shoal plan --memory says. Give as "
            "much, or another plan"
        )

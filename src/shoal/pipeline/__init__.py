"""Pipeline schedules as pure data: who runs which part of which microbatch, in which order; checked and timed before anything runs."""

from shoal.pipeline.actions import Action, Schedule
from shoal.pipeline.balance import balance
from shoal.pipeline.check import check, live_activations
from shoal.pipeline.files import read_schedule, write_schedule
from shoal.pipeline.schedules import SCHEDULES, make_schedule
from shoal.pipeline.simulate import Costs, Simulated, simulate
from shoal.pipeline.versions import kept_versions, versions

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Schedule",
    "Simulated",
    "balance",
    "check",
    "kept_versions",
    "live_activations",
    "make_schedule",
    "read_schedule",
    "simulate",
    "versions",
    "write_schedule",
]

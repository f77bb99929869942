"""Pipeline parallelism: schedules are plain data (who runs which part of which microbatch, in which order), checked and
timed before anything runs; one interpreter runs them."""

from shoal.pipeline.actions import Action, Kind, Schedule
from shoal.pipeline.balance import balance
from shoal.pipeline.check import check, kept, live_activations
from shoal.pipeline.cut import (
    check_schedule,
    cut_into_stages,
    delay,
    given_stages,
    samples_to_fill,
    schedule_of,
    steady,
)
from shoal.pipeline.endless import Endless
from shoal.pipeline.files import read_schedule, write_schedule
from shoal.pipeline.find_routes import look
from shoal.pipeline.interpreter import Work
from shoal.pipeline.model import PipelinedModule
from shoal.pipeline.passes import Pass
from shoal.pipeline.routes import Routes
from shoal.pipeline.runner import Runner
from shoal.pipeline.schedules import SCHEDULES, make_schedule
from shoal.pipeline.simulate import Costs, simulate
from shoal.pipeline.split import Split
from shoal.pipeline.units import check_cut, stages_of, units_of

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Endless",
    "Kind",
    "Pass",
    "PipelinedModule",
    "Routes",
    "Runner",
    "Schedule",
    "Split",
    "Work",
    "balance",
    "check",
    "check_cut",
    "check_schedule",
    "cut_into_stages",
    "delay",
    "given_stages",
    "kept",
    "live_activations",
    "look",
    "make_schedule",
    "read_schedule",
    "samples_to_fill",
    "schedule_of",
    "simulate",
    "stages_of",
    "steady",
    "units_of",
    "write_schedule",
]

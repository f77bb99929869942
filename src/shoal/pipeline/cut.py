"""Cuts a built model into the stages that a plan asks for, and makes the runner of this rank's stages."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from shoal.comm import World
from shoal.errors import UserError, check_choice
from shoal.mesh import Mesh
from shoal.module.build import Built
from shoal.pipeline.actions import Schedule
from shoal.pipeline.files import read_schedule
from shoal.pipeline.runner import Runner
from shoal.pipeline.schedules import SCHEDULES, make_schedule
from shoal.pipeline.split import Split
from shoal.pipeline.units import Stages, stages_of, units_of
from shoal.plan import Plan, option_name, option_parameters

FILE = "file"
"""The name of a schedule that is read."""


def check_schedule(plan: Plan) -> None:
    """Raises UserError for a schedule that there is not, also where no pipeline would run it."""
    name = option_name(plan.schedule, "schedule")
    check_choice(f'plan.schedule = "{name}" is none of', name, [*SCHEDULES, FILE])


def schedule_of(plan: Plan, microbatches: int) -> Schedule:
    """Returns the plan's schedule for a step of `microbatches` on a rank. Raises UserError for a wrong name or
    parameter."""
    name, parameters = option_name(plan.schedule, "schedule"), option_parameters(plan.schedule)
    if name == FILE:
        return _from_file(plan, parameters, microbatches)
    takes = {"vertical_sync"} if name == "pipedream" else set() if name == "2bw" else {"chunks"}
    unknown = parameters.keys() - takes
    if unknown:
        told = f"; it has {', '.join(takes)}" if takes else ""
        raise UserError(f'plan.schedule = "{name}" has no parameter {", ".join(sorted(unknown))}{told}')
    if not isinstance(parameters.pop("vertical_sync", False), bool):
        raise UserError('plan.schedule = "pipedream": vertical_sync is true or false')
    if type(chunks := parameters.get("chunks", 1)) is not int:
        raise UserError(f'plan.schedule = "{name}": chunks = {chunks!r:.100}: give the number of stages of a rank')
    return make_schedule(name, plan.pp, microbatches, **parameters)


def steady(plan: Plan, microbatches: int) -> Schedule:
    """Returns the plan's schedule as it runs in steady state.

    Without a flush that takes at least enough microbatches to fill the pipeline, since those of following steps are
    under way too.
    """
    flushes = schedule_of(plan, 1).flushes
    return schedule_of(plan, microbatches if flushes else max(microbatches, plan.pp))


FILLS = 4
"""Microbatches for each rank of a pipeline, where nobody says how many: of 1f1b less than a fifth of the time is then
spent waiting."""


def samples_to_fill(plan: Plan, samples: int) -> int:
    """Returns the default number of samples in a microbatch, given the `samples` of a replica's step.

    In a pipeline it is small enough for FILLS x plan.pp microbatches, as even as possible. Otherwise it is all of them,
    also for a schedule from a file, which has its own number, and for pipedream, whose step is one microbatch.
    """
    if plan.pp == 1 or option_name(plan.schedule, "schedule") in ("file", "pipedream"):
        return samples
    most = max(1, samples // (FILLS * plan.pp))
    even = [size for size in range(1, most + 1) if samples % size == 0 and samples // size % plan.pp == 0]
    return even[-1] if even and even[-1] * 2 > most else most


def given_stages(plan: Plan) -> Stages | None:
    """Returns the cut that the plan gives by numbers or names. Raises UserError for one that is to be measured or
    searched."""
    if isinstance(plan.stages, str | Mapping):
        raise UserError(
            f'plan.stages = "{option_name(plan.stages, "stages")}" needs the data of a job: an Engine takes numbers of '
            "blocks or names of parts; shoal.planner.with_stages gives a plan that has them"
        )
    return plan.stages


def delay(plan: Plan, place: int) -> int:
    """Returns the delay of updates in a schedule without a flush, on the rank at index `place` of the pipeline.

    It is the number of versions between the weights that the gradients were taken at and those that they update.
    """
    if option_name(plan.schedule, "schedule") == "2bw":
        return 1
    return plan.pp - 1 - (0 if option_parameters(plan.schedule).get("vertical_sync") else place)


def _from_file(plan: Plan, parameters: dict[str, object], microbatches: int) -> Schedule:
    path, chunks, placement = parameters.get("path"), parameters.get("chunks", 1), parameters.get("placement", "loop")
    most = parameters.get("activations")
    if not (
        parameters.keys() <= {"path", "chunks", "placement", "activations"}
        and isinstance(path, str)
        and isinstance(chunks, int)
        and placement in ("loop", "v")
        and isinstance(most, int | None)
    ):
        raise UserError(
            'plan.schedule = "file" takes path, and perhaps chunks (a rank), placement ("loop" or "v") and activations '
            "(the most forwards that a rank keeps at a time)"
        )
    schedule = read_schedule(Path(path), chunks, placement, most)
    if not schedule.flushes:
        raise UserError(
            f'the schedule {path} has updates (U) among its actions: only "pipedream" and "2bw" run without a flush'
        )
    if schedule.ranks != plan.pp:
        raise UserError(f"the schedule {path} is for {schedule.ranks} ranks, the plan has pp = {plan.pp}")
    return schedule if schedule.microbatches == microbatches else schedule.of_first(microbatches)


def cut_into_stages(built: Built, plan: Plan, mesh: Mesh, world: World) -> Runner | None:
    """Removes from `built.module` the stages of other ranks; returns the runner of those that remain, None where all
    do.

    Raises UserError, on every rank alike, for a model that cannot be cut so.
    """
    if plan.pp == 1:
        return None
    one = schedule_of(plan, 1)
    units = units_of(built.module)
    stages = stages_of(units, one.stages, given_stages(plan))
    split = Split(built, units, stages, one.stages_of(mesh.rank("pp")))
    return Runner(split, partial(schedule_of, plan), world.group("pp", mesh.ranks("pp")), world)

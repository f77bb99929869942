"""From a plan to the stages of a built model, and what runs those of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from shoal.comm import World
from shoal.errors import UserError
from shoal.mesh import Mesh
from shoal.module.build import Built
from shoal.pipeline.actions import Schedule
from shoal.pipeline.files import read_schedule
from shoal.pipeline.runner import Runner
from shoal.pipeline.schedules import make_schedule
from shoal.pipeline.split import Split
from shoal.pipeline.units import Stages, stages_of, units_of
from shoal.plan import Plan, option_name, option_parameters


def schedule_of(plan: Plan, microbatches: int) -> Schedule:
    """The schedule of a step of that many microbatches on a rank. UserError for one that the plan does not name rightly."""
    name, parameters = option_name(plan.schedule, "schedule"), option_parameters(plan.schedule)
    if name == "file":
        return _from_file(plan, parameters, microbatches)
    takes = {"vertical_sync"} if name == "pipedream" else set() if name == "2bw" else {"chunks"}
    unknown = parameters.keys() - takes
    if unknown:
        told = f"; it has {', '.join(takes)}" if takes else ""
        raise UserError(f'plan.schedule = "{name}" has no parameter {", ".join(sorted(unknown))}{told}')
    if not isinstance(parameters.pop("vertical_sync", False), bool):
        raise UserError('plan.schedule = "pipedream": vertical_sync is true or false')
    return make_schedule(name, plan.pp, microbatches, **parameters)


def steady(plan: Plan, microbatches: int) -> Schedule:
    """The same, where there is no flush with enough microbatches to fill the pipe: those of following steps are under way too."""
    flushes = schedule_of(plan, 1).flushes
    return schedule_of(plan, microbatches if flushes else max(microbatches, plan.pp))


FILLS = 4
"""Microbatches for each rank of a pipeline, where nobody says how many: of 1f1b less than a fifth of the time is then spent waiting."""


def samples_to_fill(plan: Plan, samples: int) -> int:
    """Samples of a microbatch, of `samples` that a replica has in a step, where nobody says how many: all of them, but in a pipeline few enough for FILLS x plan.pp microbatches, as even as can be.
    A file's schedule has a number of its own, and a step of pipedream is one microbatch."""
    if plan.pp == 1 or option_name(plan.schedule, "schedule") in ("file", "pipedream"):
        return samples
    most = max(1, samples // (FILLS * plan.pp))
    even = [size for size in range(1, most + 1) if samples % size == 0 and samples // size % plan.pp == 0]
    return even[-1] if even and even[-1] * 2 > most else most


def given_stages(plan: Plan) -> Stages | None:
    """Numbers or names of the plan. UserError for what is still to be found out."""
    if isinstance(plan.stages, str | Mapping):
        raise UserError(
            f'plan.stages = "{option_name(plan.stages, "stages")}" needs the data of a job: an Engine takes numbers of blocks or names of parts; shoal.planner.with_stages gives a plan that has them'
        )
    return plan.stages


def delay(plan: Plan, place: int) -> int:
    """By how many versions the weights are older than the newest where an update of them is made, at the `place` of a pipeline whose schedule has no flush (see unflushed)."""
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
            'plan.schedule = "file" takes path, and perhaps chunks (a rank), placement ("loop" or "v") and activations (the most forwards that a rank keeps at a time)'
        )
    schedule = read_schedule(Path(path), chunks, placement, most)
    if not schedule.flushes:
        raise UserError(f'the schedule {path} has updates (U) among its actions: only "pipedream" and "2bw" run without a flush')
    if schedule.ranks != plan.pp:
        raise UserError(f"the schedule {path} is for {schedule.ranks} ranks, the plan has pp = {plan.pp}")
    return schedule if schedule.microbatches == microbatches else schedule.of_first(microbatches)


def cut_into_stages(built: Built, plan: Plan, mesh: Mesh, world: World) -> Runner:
    """Leaves of `built.module` the stages that this rank has. UserError for a model that cannot be cut so, on every rank alike."""
    one = schedule_of(plan, 1)
    units = units_of(built.module)
    stages = stages_of(units, one.stages, given_stages(plan))
    split = Split(built, units, stages, one.stages_of(mesh.rank("pp")))
    return Runner(split, partial(schedule_of, plan), world.group("pp", mesh.ranks("pp")), world)

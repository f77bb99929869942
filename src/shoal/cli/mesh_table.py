"""`shoal plan`: the coordinates of each rank on the mesh, and what ranks share or divide along each axis."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.jobs.config import Auto, Job
from shoal.jobs.imports import imports
from shoal.jobs.ranks import ranks_here, spread
from shoal.jobs.read import load_job
from shoal.mesh import ALONG, AXES, Mesh
from shoal.plan import Plan

MOST = 16
"""Largest number of rows and of columns shown; of a larger mesh the first and the last ones."""


def show_mesh(job: Path, assignments: Sequence[str], as_json: bool) -> None:
    """Prints the mesh of a job file's plan, without building the model or opening the data.

    Raises UserError for a plan that does not fit the ranks, and for settings that the model does not take.
    """
    given, origins = load_job(job, assignments)
    settled = replace(given, auto=Auto())  # nobody is asked, so what is given has to be a whole plan
    plan = spread(settled, origins, max(ranks_here(settled), settled.plan.size))[0].plan
    with imports(compiled=False):  # models need more of torch than a mesh
        from shoal.jobs.model_table import check_model

    check_model(given)
    if as_json:
        mesh = Mesh(plan, 0, plan.size)
        shown = {"plan": plan.to_dict(), "ranks": mesh.grid.tolist(), "experts": mesh.experts.tolist()}
        print(json.dumps({**shown, "said": who_chooses(given.auto)}))
        return
    stages = how_stages_run(replace(settled, plan=plan)) if plan.pipelined else []
    Console(highlight=False, soft_wrap=True).print(
        mesh_table(plan), *who_holds_what(plan), *stages, *who_chooses(given.auto), sep="\n"
    )


def who_chooses(auto: Auto) -> list[str]:
    """A line for a job whose plan is the planner's, of which only what the job gives is shown."""
    said = (
        "shoal train asks the planner, which may choose another plan: this is what the job gives, data parallel beside "
        "it. shoal plan JOB --on here shows the answer for this machine"
    )
    return [said] if auto.wanted else []


def mesh_table(plan: Plan) -> Table:
    """Makes a table of rank numbers: rows are coordinates on pp, dp and cp, columns on tp. Under `plan.ep` a cell also
    has the rank's index on ep."""
    mesh = Mesh(plan, 0, plan.size)
    degrees = " x ".join(f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1)
    table = Table(
        title=f"{plan.size} rank(s) by number: {degrees or 'dp 1'}", title_justify="left", box=None, pad_edge=False
    )
    *outside, inner = AXES
    outer = [axis for axis in outside if mesh.size(axis) > 1]
    for axis in outer:
        table.add_column(axis, justify="right", no_wrap=True)
    columns = list(_shown(mesh.size(inner)))
    for place in columns:
        table.add_column("..." if place is None else f"{inner} {place}", justify="right", no_wrap=True)
    rows = mesh.grid.reshape(-1, mesh.grid.shape[-1])
    for number in _shown(len(rows)):
        if number is None:
            table.add_row(*["..."] * (len(outer) + len(columns)))
            continue
        at = mesh.at(int(rows[number, 0]))
        cells = ("..." if place is None else _cell(mesh, int(rows[number, place])) for place in columns)
        table.add_row(*(str(at[axis]) for axis in outer), *cells)
    return table


def _cell(mesh: Mesh, rank: int) -> str:
    return f"{rank} (ep {mesh.at(rank)['ep']})" if mesh.size("ep") > 1 else str(rank)


def who_holds_what(plan: Plan) -> Iterator[str]:
    """Yields a line for each axis and for ZeRO: what the ranks along it share, and what is divided among them."""
    mesh = Mesh(plan, 0, plan.size)
    for axis, what in ALONG.items():
        if mesh.size(axis) > 1:
            yield f"along {axis}: " + what.format(plan=plan, copies=mesh.size("edp"))
    if plan.zero:
        within, copies = mesh.shards()
        what = ("optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights")[
            plan.zero - 1
        ]
        again = f", {len(copies)} copies" if len(copies) > 1 else ""
        ranks = ", ".join("..." if place is None else str(within[place]) for place in _shown(len(within)))
        yield f"zero = {plan.zero}: {what} cut among {len(within)} ranks, such as {ranks}{again}"


def how_stages_run(job: Job) -> Iterator[str]:
    """Yields a line on the pipeline schedule of `job`: its bubble and its activations.

    The bubble is simulated in unit time: a forward and each half of a backward take equally long.
    """
    # imported here: the pipeline needs torch, and one rank has none
    from shoal.jobs.choose import microbatches_of
    from shoal.pipeline import Costs, check, delay, live_activations, schedule_of, simulate

    plan, microbatches = job.plan, microbatches_of(job)[1]
    schedule = schedule_of(plan, microbatches)
    check(schedule)
    each = f" ({schedule.chunks} a rank)" if schedule.chunks > 1 else ""
    held = max(live_activations(schedule)) / schedule.chunks
    what = (
        f"along pp: other stages of the model, {schedule.stages} in all{each}; {schedule.name}, "
        f"{microbatches} microbatch(es) a step"
    )
    if not schedule.flushes:
        versions = f"weights of up to {1 + delay(plan, 0)} versions"
        yield f"{what}: the next step begins before the last one has ended, so nobody waits for that; {versions}"
        return
    bubble = simulate(schedule, Costs.even(schedule.stages)).bubble
    kept = f"activations of up to {held:g} microbatches of their part"
    yield f"{what}: ranks wait {bubble:.1%} of the time for each other, and keep {kept}"


def _shown(number: int) -> Iterator[int | None]:
    """Yields 0 to `number` - 1; of more than `MOST` the first and the last ones, with None between them."""
    if number <= MOST:
        yield from range(number)
        return
    yield from range(MOST - 3)
    yield None
    yield from range(number - 2, number)

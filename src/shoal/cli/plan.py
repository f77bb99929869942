"""`shoal plan`: the mesh of a plan, its memory, or the fastest plan for a machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import UserError
from shoal.jobs.imports import imports

Nproc = Annotated[
    int | None, typer.Option("--nproc", "-n", help="Ranks on this host. Default: one for each GPU, else at most two.")
]

Pins = Annotated[
    list[str] | None, typer.Option("--pin", metavar="KEY=VALUE", help="With --on: given, the rest is found: tp=8.")
]
Allowed = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="EXCHANGE", help="With --on: may be taken too, though it is lossy: bf16."),
]
Compared = Annotated[
    Path | None,
    typer.Option("--compare", metavar="RUN", help="Instead of a job: what a run took beside the forecast."),
]
NoLearn = Annotated[bool, typer.Option("--no-learn", help="With --compare: keeps nothing for later plans.")]
Measured = Annotated[
    Path | None,
    typer.Option("--measure", metavar="FILE", help="Instead of a job: measures this machine, for --on FILE."),
]


def plan(
    job: Annotated[Path | None, typer.Argument(help="The job file, TOML.", show_default=False)] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="What a rank needs of memory, and the largest model that fits.")
    ] = False,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replaces a value of the job: --set plan.zero=3."),
    ] = None,
    nproc: Nproc = None,
    device: Annotated[str | None, typer.Option(help="As if each GPU had so much free, e.g. 80GiB.")] = None,
    host: Annotated[str | None, typer.Option(help="As if each host had so much free, e.g. 512GiB.")] = None,
    on: Annotated[
        str | None, typer.Option(metavar="MACHINE", help="Finds the plan for 8xh100, h200x64, ... or a cluster.toml.")
    ] = None,
    pins: Pins = None,
    allow: Allowed = None,
    budget: Annotated[str | None, typer.Option(help="With --on: what the whole job may cost, 40000USD.")] = None,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="With --on: draws the plan.")] = None,
    compared: Compared = None,
    no_learn: NoLearn = False,
    measured: Measured = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints one JSON object.")] = False,
) -> None:
    """Shows the mesh of ranks and what each holds; with --memory what a job will need, with --on the fastest plan for a
    machine. Nothing is trained. Exit code 1 if it does not fit this machine."""
    others = (job, memory, assignments, device, host, on, pins, allow, budget, page)
    if compared is not None:
        _compare(compared, (*others, nproc, measured), no_learn, as_json)
        return
    if measured is not None:
        _measure(measured, (*others, no_learn), nproc, as_json)
        return
    if job is None or no_learn:
        raise UserError("give a job file, or a run with --compare" if job is None else "--no-learn goes with --compare")
    if on is not None:
        if memory or (nproc, host) != (None, None):
            raise UserError("--on says which machine, whose ranks are planned: leave out --memory, --nproc and --host")
        with imports(compiled=False):
            from shoal.cli.answer import Options, answer_for

        asked = Options(on, pins or (), budget, device, allow or ())
        answer_for(job, assignments or [], asked, as_json, page)
        return
    _only_with_on({"--pin": pins, "--allow": allow, "--budget": budget, "--html": page})
    given = [*(assignments or []), *([f"run.nproc={nproc}"] if nproc is not None else [])]
    if not memory:
        if (device, host) != (None, None):
            raise UserError("--device and --host are of --memory: give it too, or --on, which takes --device")
        with imports(compiled=False):
            from shoal.cli.mesh_table import show_mesh

        show_mesh(job, given, as_json)
        return
    with imports(compiled=False):
        from shoal.cli.memory_table import ask, show

    answer = ask(job, given, device, host)
    show(answer, as_json)
    raise typer.Exit(int(not answer.fits))


def _only_with_on(given: Mapping[str, object]) -> None:
    for option, value in given.items():
        if value not in (None, []):
            raise UserError(f"{option} goes with --on: name a machine, such as --on 8xh100")


def _measure(path: Path, others: tuple[object, ...], nproc: int | None, as_json: bool) -> None:
    if any(other not in (None, False, []) for other in others):
        raise UserError("--measure is of this machine, whatever the job: leave out all but --nproc and --json")
    with imports(compiled=False):
        from shoal.cli.measured import measure_machine

    measure_machine(path, nproc, as_json)


def _compare(run: Path, others: tuple[object, ...], no_learn: bool, as_json: bool) -> None:
    if any(other not in (None, False, []) for other in others):
        raise UserError("--compare takes the job from the run's own record: leave out all but --no-learn and --json")
    with imports(compiled=False):
        from shoal.cli.compared import show_compared

    show_compared(run, not no_learn, as_json)

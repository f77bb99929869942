"""The commands and their options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import shoal
from shoal.cli import ckpt, fed, jobs
from shoal.cli.ckpt import JobFile
from shoal.cli.plan import Nproc, plan
from shoal.errors import UserError
from shoal.jobs.imports import imports
from shoal.plan import MOST_RANKS_OF_A_HOST

app = typer.Typer(
    help="Trains one PyTorch model, written for one device, on whatever devices there are.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shoal {shoal.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Shows the version and exits.")
    ] = False,
) -> None:
    """Options before a command."""


app.add_typer(ckpt.app, name="ckpt")
app.add_typer(jobs.app, name="jobs")
app.add_typer(fed.app, name="fed")

Roles = Annotated[
    str | None,
    typer.Option(
        "--roles",
        metavar="ROLE=N,...",
        help="Instead of --nproc: processes with a TF_CONFIG, ps=1,worker=3,evaluator=1.",
    ),
]


@app.command()
def train(
    job: Annotated[Path | None, typer.Argument(help="The job file, TOML.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replaces a value of the job: --set train.lr=1e-3."),
    ] = None,
    nproc: Nproc = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="LEAST:MOST", help="Nodes that may come and go, 1:4; this is the first, or Ray has them."),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Joins a job of --nodes, at one of its nodes or by its --coordinator."),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(metavar="etcd://HOST:2379/PREFIX", help="With --nodes: founds the job there, or joins it."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="INTERFACE", help="Listens for nodes there. Default: loopback.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help='"auto", "never", or the directory of a checkpoint or a run.')
    ] = None,
    roles: Roles = None,
) -> None:
    """Trains a job file. Under torchrun, Slurm, MPI, Kubernetes or TF_CONFIG this process is one of the ranks, else it
    starts them."""
    from shoal.jobs.status import rank_in

    _one_of(nproc, roles)
    if job is None and join is None:
        raise UserError("give a job file, or --join HOST:PORT")
    if not rank_in(os.environ):  # only rank 0 prints
        print(f"{job or join}: importing torch", flush=True)
    with imports():
        from shoal.cli.start import join_nodes, start_job, start_nodes, text_assignment

    given = list(assignments or [])
    given += [f"run.nproc={nproc}"] if nproc is not None else []
    given += [text_assignment("run.resume", resume)] if resume is not None else []
    if join is not None:
        if job is not None or any((nodes, coordinator, assignments, resume, roles)):
            raise UserError("--join takes the job of the first node: give --nproc and --host beside it, nothing else")
        raise typer.Exit(join_nodes(join, nproc, host))
    assert job is not None
    if nodes is not None:
        if roles is not None:
            raise UserError("--nodes and --roles both say which processes there are: give one of them")
        raise typer.Exit(start_nodes(job, given, nodes, host, coordinator))
    for option, value in (("--host", host), ("--coordinator", coordinator)):
        if value is not None:
            raise UserError(f"{option} is where nodes find each other: give --nodes or --join with it")
    raise typer.Exit(start_job(job, given, roles))


app.command()(plan)


@app.command()
def run(
    script: Annotated[Path, typer.Argument(help="A Python script that uses shoal, or torch.distributed.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments, after --.", metavar="[-- ARGS...]")] = None,
    nproc: Nproc = None,
    roles: Roles = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Starts a script on N local ranks, or in the roles of a TF_CONFIG cluster."""
    _one_of(nproc, roles)
    with imports():
        from shoal.cli.start import start_script

    raise typer.Exit(start_script([*(["-m"] if module else []), str(script), *(args or [])], nproc, roles))


def _one_of(nproc: int | None, roles: str | None) -> None:
    if nproc is not None and roles is not None:
        raise UserError("--nproc and --roles both say how many ranks to start: give one of them")


@app.command()
def demo(
    nproc: Annotated[
        int, typer.Option("--nproc", "-n", min=1, max=MOST_RANKS_OF_A_HOST, help="Ranks on this host.")
    ] = 2,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run directory. Default: a new one in runs/.")
    ] = None,
) -> None:
    """Trains a small GPT on Python's standard library for less than a minute; a worker dies, and another one joins."""
    with imports():
        from shoal.cli.demo import start_demo

    raise typer.Exit(start_demo(nproc, directory))


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Prints one JSON object.")] = False) -> None:
    """Checks this machine: what is there, what is missing, and the remedy. Exit code 1 if something fails."""
    with imports():
        from shoal.cli.doctor import examine, show

    checks, links, peaks = examine()
    show(checks, links, peaks, as_json)
    raise typer.Exit(int(any(check.state == "FAIL" for check in checks)))


@app.command()
def generate(
    path: Annotated[Path, typer.Argument(help="A run, or a checkpoint.", metavar="RUN")],
    prompt: Annotated[str, typer.Option(help="The text to go on with.")],
    tokens: Annotated[int, typer.Option(min=1, help="At most so many.")] = 160,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Draws among the likeliest so many. Default: among 40.")
    ] = 40,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Of the draws. Default: the job's.")] = None,
    job: JobFile = None,
) -> None:
    """Writes a text that begins with a prompt, by the model of a run's newest good checkpoint."""
    with imports():
        from shoal.jobs.export import generate_text

    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # a terminal may not speak UTF-8
    text = generate_text(path, prompt, job, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    print(prompt + text)


@app.command("eval")
def evaluate(
    path: Annotated[Path, typer.Argument(help="A run, or a checkpoint.", metavar="RUN")],
    data: Annotated[
        str | None,
        typer.Option(help="Text, arrays or images as data.source names them. Default: what the run held out."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="So many rows, spread evenly; 0 for all.")] = 0,
    job: JobFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints one JSON object.")] = False,
) -> None:
    """Measures the loss of a run's newest good checkpoint on other data, and the accuracy of a classifier."""
    with imports():
        from shoal.cli.evaluation import show
        from shoal.jobs.export import evaluate_run

    show(*evaluate_run(path, data, samples, job), as_json)


@app.command()
def replan(
    directory: Annotated[Path, typer.Argument(help="The directory of a run that trains.", metavar="RUN")],
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Replaces a value of the plan: --set plan.zero=3.")
    ],
) -> None:
    """Changes the plan of a run while it trains, in memory; without plan.dp that is what is left of its ranks."""
    from shoal.cli.start import change_plan

    change_plan(directory, assignments)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="The directory of a run.", metavar="RUN")]) -> None:
    """Draws the report of a run again, also while it runs."""
    with imports():
        from shoal.report.page import write_report

    try:
        page = write_report(directory)
    except OSError as error:
        raise UserError(
            f"the report of {directory} cannot be drawn: {error}. Free or allow the space, or copy the run to another "
            "place and draw it there"
        ) from error
    print(page)


@app.command()
def chaos(
    job: Annotated[Path, typer.Argument(help="The job file, TOML.")],
    schedule: Annotated[Path | None, typer.Argument(help="The faults, TOML. Default: each kind once.")] = None,
    faults: Annotated[str | None, typer.Option(metavar="KIND,...", help="Draws a schedule with these faults.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the order, the steps and whom faults meet.")] = 0,
    nodes: Annotated[str, typer.Option(metavar="LEAST:MOST", help="MOST nodes; LEAST go on.")] = "1:3",
    nproc: Annotated[
        int, typer.Option("--nproc", "-n", min=1, max=MOST_RANKS_OF_A_HOST, help="Ranks of each node.")
    ] = 1,
    directory: Annotated[Path | None, typer.Option("--dir", help="A new folder. Default: one in runs/.")] = None,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Relative difference of losses from the reference.")] = 1e-5,
    pace: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds of a step at least. Default: 6 s between faults.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replaces a value of the job: --set train.steps=400."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints one JSON object.")] = False,
) -> None:
    """Trains a job on nodes of this host, undisturbed and then under faults, and compares. Exit code 1 if anything was
    lost."""
    with imports():
        from shoal.cli.chaos import rehearse

    raise typer.Exit(
        rehearse(
            job,
            schedule,
            faults,
            seed,
            nodes=nodes,
            nproc=nproc,
            directory=directory,
            tolerance=tolerance,
            pace=pace,
            assignments=assignments or [],
            as_json=as_json,
        )
    )


@app.command()
def top(
    directory: Annotated[Path, typer.Argument(help="The directory of a run.", metavar="RUN")],
    once: Annotated[bool, typer.Option("--once", help="One frame, as where stdout is no terminal.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between frames.")] = 1.0,
) -> None:
    """Watches a run: progress, loss, ranks, last events. Ctrl-C ends the view, not the run."""
    from shoal.cli.top import show

    show(directory, once, interval)

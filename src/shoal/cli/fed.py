"""`shoal fed`: clients that train on samples of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.jobs.imports import imports

app = typer.Typer(help="Trains with clients whose samples stay with them.", no_args_is_help=True)


@app.command()
def sim(
    job: Annotated[Path, typer.Argument(help="The job file, TOML, with a table [federated].")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replaces a value of the job: --set federated.clients=100."),
    ] = None,
    flower: Annotated[bool, typer.Option("--flower", help="With Flower's strategies.")] = False,
) -> None:
    """Simulates all clients in this process."""
    with imports():
        from shoal.jobs.__main__ import tell
        from shoal.jobs.federated.simulate import simulate
        from shoal.jobs.read import load_job

    outcome = simulate(*load_job(job, assignments or []), flower)
    if outcome.report is not None:
        tell(outcome)
    raise typer.Exit(128 + outcome.signal if outcome.signal else 0)

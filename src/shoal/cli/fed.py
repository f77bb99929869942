"""`shoal fed`: clients that train on samples of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import UserError
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
        from shoal.jobs.__main__ import told
        from shoal.jobs.federated.simulate import simulate
        from shoal.jobs.read import load_job

    outcome = simulate(*load_job(job, assignments or []), flower)
    raise typer.Exit(told(outcome))


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="The directory for certificates and keys.")],
    clients: Annotated[int, typer.Option("--clients", min=0, help="Makes keys for so many more clients.")] = 0,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or address that clients call the server by; several times for several."),
    ] = None,
) -> None:
    """Makes the certificates of a server, and keys of clients."""
    with imports():
        from shoal.federated.flower.keys import make_keys

    if hosts and (folder / "server.crt").exists():
        raise UserError(
            f"{folder} has the certificate of a server already, and --host is of a new one: leave it out, or give "
            "another directory"
        )
    make_keys(folder, clients, hosts or ["localhost", "127.0.0.1"])
    typer.echo(f"{folder}: a server needs server.crt, server.key and clients/*.pub; a client ca.crt and its own key")


ASSIGNMENTS = typer.Option("--set", metavar="KEY=VALUE", help="Replaces a value of the job: --set train.lr=0.1.")
CERTIFICATES = typer.Option("--certificates", metavar="DIR", help="What `shoal fed keys` has made.")


@app.command()
def server(
    job: Annotated[Path, typer.Argument(help="The job file, TOML, with a table [federated].")],
    certificates: Annotated[Path | None, CERTIFICATES] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and keys, on loopback alone.")] = False,
    address: Annotated[
        str, typer.Option("--address", help="Where it listens; only there. Port 0: any.")
    ] = "127.0.0.1:9443",
    deadline: Annotated[
        float | None, typer.Option("--deadline", metavar="SECONDS", help="The longest time of a round.")
    ] = None,
    begin_with: Annotated[
        int | None, typer.Option("--begin-with", help="Waits for so many clients before the first round.")
    ] = None,
    patience: Annotated[
        float, typer.Option("--patience", metavar="SECONDS", help="Without a sign of life a client is gone.")
    ] = 10.0,
    assignments: Annotated[list[str] | None, ASSIGNMENTS] = None,
) -> None:
    """Trains with real clients, which sign in over TLS."""
    with imports():
        from shoal.jobs.__main__ import told
        from shoal.jobs.federated.serve import Serving, serve
        from shoal.jobs.read import load_job

    _one_of(certificates, insecure)
    serving = Serving(address, certificates, deadline, begin_with, patience)
    outcome = serve(*load_job(job, assignments or []), serving)
    raise typer.Exit(told(outcome))


@app.command()
def client(
    job: Annotated[Path, typer.Argument(help="The job file, TOML, with a table [federated].")],
    server_at: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="The server.")] = "127.0.0.1:9443",
    certificates: Annotated[Path | None, CERTIFICATES] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS and key, on loopback alone.")] = False,
    number: Annotated[
        int | None,
        typer.Option("--client", help="Trains on this share of the data, from 0 on; without it, on all of it."),
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="Its private key; else that of --client.")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", help="Ranks on this host: a mesh under [plan].")] = None,
    wait: Annotated[float, typer.Option("--wait", metavar="SECONDS", help="How long a server may not answer.")] = 600.0,
    assignments: Annotated[list[str] | None, ASSIGNMENTS] = None,
) -> None:
    """Takes part in the training of a server with samples of its own."""
    with imports():
        from shoal.jobs.federated.take_part import Taking, take_part

    _one_of(certificates, insecure)
    taking = Taking(
        server_at,
        None if certificates is None else str(certificates),
        number,
        None if key is None else str(key),
        wait,
    )
    raise typer.Exit(take_part(job, assignments or [], taking, nproc))


def _one_of(certificates: Path | None, insecure: bool) -> None:
    """Raises UserError where TLS is neither given nor declined."""
    if (certificates is None) is not insecure:
        raise UserError(
            "give --certificates DIR (`shoal fed keys DIR` makes it), or --insecure for a test on this machine, and "
            "not both"
        )

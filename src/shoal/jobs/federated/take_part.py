"""A client of a job whose clients are real: `shoal fed client`, on one rank or as a mesh of several.

The entry point of each of several ranks: python -m shoal.jobs.federated.take_part job.toml OPTIONS [key=value ...],
with options as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import UserError, in_section
from shoal.federated.clients import Clients
from shoal.federated.mesh import MeshClient
from shoal.federated.recipe import Recipe
from shoal.federated.schedule import crowd_of
from shoal.jobs.choose import at_size
from shoal.jobs.config import Job, Origins
from shoal.jobs.federated.holdings import Dealt, deal
from shoal.jobs.federated.rounds import recipe_of
from shoal.jobs.federated.serve import is_loopback, parse
from shoal.jobs.read import load_job
from shoal.launch import join
from shoal.launch.local import launch, signals

NUMBERS = 1 << 30
"""Numbers of clients by which they draw."""


@dataclass(frozen=True)
class Taking:
    """How a client takes part.

    server: "host:port". certificates: see flower/keys; None: no TLS and no key. client: which share of the data it
    has; None: all of it. key: its private key; None: that of its number in `certificates`. wait: seconds after which a
    server that does not answer is given up.
    """

    server: str
    certificates: str | None = None
    client: int | None = None
    key: str | None = None
    wait: float = 600.0


def take_part(path: Path, assignments: list[str], taking: Taking, nproc: int | None) -> int:
    """Takes part on `nproc` ranks of this host, by default those of the job's plan; returns the exit code. Raises
    UserError."""
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc {nproc}: give at least 1 rank")
    job, _ = load_job(path, assignments)
    if job.auto.wanted:
        raise UserError(
            'plan = "auto" with `shoal fed client`: nobody asks the planner there, and no plans are tried. Give the '
            f"whole [plan] in place of plan.name, plan.measure and plan.allow; shoal plan {path} --on here shows one"
        )
    _check(taking)
    ranks = nproc or job.run.nproc or job.plan.size
    if ranks == 1:
        return _on_rank(path, assignments, taking, World.single())
    program = ["-m", __name__, str(path), json.dumps(asdict(taking)), *assignments]
    return launch(program, ranks)


def _check(taking: Taking) -> None:
    host, _ = parse(taking.server)
    if not taking.wait > 0:
        raise UserError(f"--wait {taking.wait}: give a number of seconds above 0")
    if taking.certificates is None and not is_loopback(host):
        raise UserError(f"--insecure to {host}: without certificates a server on this machine alone is asked")
    from shoal.federated.flower.keys import private_bytes  # raises UserError where Flower is missing

    if (key := _key(taking)) is not None:
        private_bytes(key)


def _key(taking: Taking) -> Path | None:
    if taking.certificates is None:
        return None
    if taking.key is not None:
        return Path(taking.key)
    if taking.client is None:
        raise UserError("a client that has all of data.source gives the key that it signs in with: --key FILE")
    return Path(taking.certificates) / "clients" / f"{taking.client}.key"


def _on_rank(path: Path, assignments: list[str], taking: Taking, world: World) -> int:
    with signals() as received:
        dealt, own, number = _own(*load_job(path, assignments), taking)
        settled = at_size(dealt.settled, world)
        recipe = recipe_of(dealt)
        engine = _engine(settled.job, recipe, world)
        try:
            mesh = MeshClient(engine, recipe, own, number)
            if world.rank:
                mesh.follow()
                return 0
            with mesh:
                over = _serve(mesh, dealt, taking, number, lambda: bool(received) or mesh.broken is not None)
        finally:
            engine.close()
            world.close()
        if mesh_failed := None if over or received else mesh.broken:
            raise mesh_failed
    return 128 + received[0] if received and not over else 0


def _own(job: Job, origins: Origins, taking: Taking) -> tuple[Dealt, Clients, int]:
    """Returns the data, this client's part of it, and the number by which it draws."""
    if job.federated is not None and taking.client is None:
        if job.data.tokenizer.startswith("bpe:"):
            raise UserError(
                f'data.tokenizer = "{job.data.tokenizer}" would be trained on this client\'s own data, and its ids '
                "would mean other tokens than those of other clients: give all of them one, such as the folder "
                "`tokenizer` that the server writes to its run directory as it starts: data.tokenizer = FOLDER"
            )
        job = replace(job, federated=replace(job.federated, clients=1, partition="iid", fraction=1.0, least=1))
    dealt = deal(job, origins)
    client = 0 if taking.client is None else taking.client
    if not 0 <= client < dealt.shares.clients:
        raise UserError(f"--client {client}: the {dealt.shares.clients} clients have the numbers from 0 on")
    own = dealt.client(client, torch.device("cpu"))
    return dealt, own, client if taking.client is not None else _drawn(taking)


def _drawn(taking: Taking) -> int:
    """Returns a number for a client that has none, by its key."""
    from shoal.data.keyed import derive_key

    key = _key(taking)
    return NUMBERS + (0 if key is None else int(derive_key(key.read_text(), 0)) % NUMBERS)


def _engine(job: Job, recipe: Recipe, world: World) -> Engine:
    train = job.train
    with in_section("train"):
        return Engine(
            recipe.model,
            recipe.loss,
            recipe.optimizer,
            job.plan,
            global_batch=recipe.batch,
            microbatch=train.microbatch,
            precision=train.precision,
            seed=recipe.seed,
            clip=recipe.clip,
            param_groups=recipe.param_groups,
            sync_bn=train.sync_bn,
            buffers=train.buffers,
            world=world,
        )


def _serve(mesh: MeshClient, dealt: Dealt, taking: Taking, number: int, stopped: Callable[[], bool]) -> bool:
    """Answers the server; returns whether that is over."""
    from shoal.federated.flower import node, private
    from shoal.federated.flower.mesh import client_app
    from shoal.federated.flower.private.supernode import Node
    from shoal.federated.flower.secure_mod import secure_mod

    private.quieten(private.CRITICAL)
    key, root = _key(taking), None if taking.certificates is None else Path(taking.certificates) / "ca.crt"
    steps = int(crowd_of(dealt.federated, mesh.counts, mesh.batch, 0).steps[0])
    print(f"a client with {mesh.samples} samples, {steps} local steps, on {mesh.ranks} ranks", flush=True)

    def say(line: str) -> None:
        print(line, flush=True)

    link = Node(taking.server, None if key is None else key.read_bytes(), root)
    try:
        mods = [] if dealt.federated.secure is None else [secure_mod]
        return node.serve(link, client_app(mesh, steps, mods), number, stopped, taking.wait, say)
    finally:
        link.leave()


if __name__ == "__main__":
    sys.exit(_on_rank(Path(sys.argv[1]), sys.argv[3:], Taking(**json.loads(sys.argv[2])), join()))

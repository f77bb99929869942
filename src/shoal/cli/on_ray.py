"""`shoal train --nodes` on a cluster of Ray: this process has Ray place the nodes; each of them is `main` below."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.cli.start import arrange, program_of, text_assignment
from shoal.comm.address import host_port
from shoal.elastic.limits import node_limits
from shoal.elastic.nodes import Program, found, join
from shoal.elastic.ray_actor import MEMBER, OVER
from shoal.elastic.ray_nodes import Wanted, run
from shoal.errors import UserError
from shoal.jobs.config import Job
from shoal.jobs.generation import resuming
from shoal.jobs.lock import refuse_if_taken
from shoal.jobs.plans import forget
from shoal.jobs.ranks import fitted, spread
from shoal.jobs.read import load_job
from shoal.launch.rank import die_with_launcher
from shoal.launch.ray import machines, ray_package

OLDEST = (2, 49)
"""The first Ray that heeds what a bundle says of Ray nodes to shun: 2.48 places it there nevertheless."""


@dataclass(frozen=True)
class Task:
    """What each node is told. nodes: as in --nodes. ranks: how many it starts. interface: as in --host. The others: see
    Program."""

    arguments: list[str]
    file: str
    run_dir: str
    nodes: str
    ranks: int
    interface: str | None


def start_on_ray(
    path: Path, assignments: Sequence[str], nodes: str, interface: str | None, coordinator: str | None
) -> int:
    """Trains the job file on nodes that are actors of Ray; returns the exit code."""
    if coordinator is not None:
        raise UserError(
            f"--coordinator {coordinator}: RAY_ADDRESS={os.environ['RAY_ADDRESS']} is set, and on Ray this process "
            "says who founds the job. Leave --coordinator out, or unset RAY_ADDRESS"
        )
    refuse_if_older(ray_package().__version__)
    limits = node_limits(nodes)
    job, origins = load_job(path, assignments)
    ranks, resources = share(job, machines())
    spread(job, origins, ranks) if limits[0] == 1 else fitted(job, ranks)
    program = program_of(path, assignments, job, origins)
    refuse_if_taken(program.run_dir)
    forget(program.run_dir)
    reserved = ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
    print(f"each node is an actor of Ray, with {ranks} ranks; it reserves {reserved}", flush=True)
    task = Task(program.arguments, str(program.file), str(program.run_dir), nodes, ranks, interface)
    return run(Wanted(["-m", "shoal.cli.on_ray", json.dumps(asdict(task))], *limits, ranks, resources))


def refuse_if_older(version: str) -> None:
    """Raises UserError for a Ray before OLDEST. The nodes have the driver's, which Ray itself sees to."""
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UserError(
            f"Ray {version} is installed, which cannot be told which Ray nodes to leave out: pip install "
            f"'ray>={needed}' here and on all Ray nodes"
        )


def share(job: Job, machines: Sequence[Mapping[str, float]]) -> tuple[int, dict[str, float]]:
    """Returns how many ranks each node has, and what it reserves. machines: the resources of the Ray nodes.

    A node has `run.nproc` ranks, else `cluster.gpus`, else as many as the plan, else one for each GPU of a Ray node, or
    two without any. It reserves what `[cluster]` says; by default a CPU for each rank, and a GPU where there are any.
    """
    most = {name: int(max((each.get(name, 0) for each in machines), default=0)) for name in ("CPU", "GPU")}
    asked, planned = job.cluster, job.plan.size if job.plan.size > 1 else 0
    ranks = job.run.nproc or asked.gpus or planned or most["GPU"] or max(1, min(2, most["CPU"]))
    gpus = asked.gpus or (ranks if most["GPU"] >= ranks else 0)
    wanted: dict[str, float | None] = {"CPU": asked.cpus or ranks, "GPU": gpus, "memory": asked.memory_bytes}
    return ranks, {name: float(amount) for name, amount in wanted.items() if amount}


def again(arguments: list[str], founding: int) -> list[str]:
    """Returns the arguments of a job that is founded for the `founding`th time. Where all of its nodes were lost before
    it goes on from its own checkpoints, if it has any, whatever run.resume says."""
    if founding == 1:
        return arguments
    job, _ = load_job(Path(arguments[2]), arguments[3:])
    return [*arguments, text_assignment("run.resume", resuming(job, founding).run.resume)]


def main() -> None:
    """Is the supervisor of a node; see ray_actor.Order for the arguments. Exits with its code."""
    die_with_launcher(int(os.environ["SHOAL_LAUNCHER"]))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a thread of Ray has started this, with SIGINT blocked
    text, founding, members, host, descriptor = sys.argv[1:]
    task = Task(**json.loads(text))
    listens = task.interface or host

    def tell(word: str, about: object) -> None:
        os.write(int(descriptor), f"{word} {about}\n".encode())

    def came(address: tuple[str, int]) -> None:
        tell(MEMBER, host_port(*address))

    if members:
        code = join(members, task.ranks, listens, arrange, came=came)
    else:
        program = Program(again(task.arguments, int(founding)), Path(task.file), Path(task.run_dir))
        code = found(program, node_limits(task.nodes), task.ranks, listens, arrange, came=came)
    tell(OVER, code)
    sys.exit(code)


if __name__ == "__main__":
    main()

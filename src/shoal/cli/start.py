"""Starts the ranks of a command on this host."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.elastic.launched import PATIENCE, as_node
from shoal.elastic.limits import node_limits
from shoal.elastic.nodes import Program, found, found_or_join, join
from shoal.errors import UserError
from shoal.jobs.config import Job, Origins
from shoal.jobs.lock import refuse_if_taken
from shoal.jobs.plans import forget, kept
from shoal.jobs.ranks import default_ranks, fitted, ranks_here, spread
from shoal.jobs.read import load_job, plan_assignments
from shoal.jobs.served.settings import check_served
from shoal.launch import discover, launch
from shoal.launch.identity import SINGLE
from shoal.launch.ray import names_cluster
from shoal.launch.roles import launch_roles
from shoal.launch.served import RESTARTS, launch_served
from shoal.launch.tf_config import TRAINERS, parse_roles
from shoal.toml import plan_text


def start_job(path: Path, assignments: Sequence[str], roles: str | None = None) -> int:
    """Trains the job file on the ranks of this host; returns the exit code.

    roles: the number of local processes of each role, "worker=3,evaluator=1"; by default the job's ranks.

    A process that another launcher started is itself a rank, or the evaluator. A single rank runs in this process.
    Raises UserError for an invalid job before any rank starts.
    """
    counts = parse_roles(roles) if roles is not None else {}
    if counts:
        assignments = [*assignments, f"run.nproc={_trainers(counts)}"]
    job, origins = load_job(path, assignments)
    outside = discover()
    within = outside.size > 1 or not outside.trains or bool(outside.servers)
    if counts and within:
        raise UserError(f"--roles {roles}: {outside.source} has started this process already. Leave --roles out")
    nproc = 1 if within else ranks_here(job)
    if "ps" in counts:
        check_served(job, nproc)
    elif not within:
        spread(job, origins, nproc)
    if nproc == 1 and not counts:
        from shoal.jobs.__main__ import run

        return run(str(path), list(assignments))
    refuse_if_taken(Path(job.run.dir))
    print(f"starting {_spoken(counts) or f'{nproc} ranks'}: importing torch", flush=True)
    program = ["-m", "shoal.jobs", str(path), *assignments]
    if "ps" in counts:
        restarts = RESTARTS if job.server.restarts is None else job.server.restarts
        return launch_served(program, counts, Path(job.run.dir), restarts)
    if counts:
        return launch_roles(program, counts, run_dir=Path(job.run.dir))
    return launch(program, nproc, run_dir=Path(job.run.dir))


def _trainers(counts: Mapping[str, int]) -> int:
    """Returns the number of processes that train."""
    return sum(count for role, count in counts.items() if role in TRAINERS)


def _spoken(counts: Mapping[str, int]) -> str:
    """Returns the roles of a job with a parameter server in words; "" where it has none."""
    if "ps" not in counts:
        return ""
    words = {"ps": "parameter server"}
    return ", ".join(f"{count} {words.get(role, role)}{'s' * (count > 1)}" for role, count in counts.items())


def start_nodes(
    path: Path, assignments: Sequence[str], nodes: str, interface: str | None, coordinator: str | None = None
) -> int:
    """Trains the job file on nodes that come and go; returns the exit code.

    This is the first node, or where `coordinator` is the URL of an etcd cluster any of them. A launcher may start one
    process on each node: its first one is the first node, at the address that it gives to rank 0. Where RAY_ADDRESS
    names a cluster of Ray all nodes are actors there, and this process is none.
    """
    if names_cluster() and discover() == SINGLE:
        from shoal.cli.on_ray import start_on_ray

        return start_on_ray(path, assignments, nodes, interface, coordinator)
    limits = node_limits(nodes)
    job, origins = load_job(path, assignments)
    outside = as_node(Path(job.run.dir).resolve(), coordinator is None)
    if outside is not None and outside.number > 0:
        return join(outside.address, ranks_here(job), interface, arrange, PATIENCE)
    here = ranks_here(job)
    fitted(job, here)  # refuses what nodes cannot have
    program = program_of(path, assignments, job, origins)
    if coordinator is not None:
        return found_or_join(program, limits, here, interface, arrange, coordinator)
    refuse_if_taken(program.run_dir)
    forget(program.run_dir)  # what an earlier run has kept
    if outside is None:
        return found(program, limits, here, interface, arrange)
    return found(program, limits, here, interface or outside.own_host(), arrange, outside.port)


def program_of(path: Path, assignments: Sequence[str], job: Job, origins: Origins) -> Program:
    """Returns what the nodes of a job run."""
    arguments = ["-m", "shoal.jobs", str(path.resolve()), *assignments]
    if "run.dir" not in origins:
        arguments.append(text_assignment("run.dir", job.run.dir))
    return Program(arguments, path.resolve(), Path(job.run.dir).resolve())


def join_nodes(address: str, nproc: int | None, interface: str | None) -> int:
    """Joins a job whose nodes come and go; returns the exit code."""
    return join(address, nproc if nproc is not None else default_ranks(), interface, arrange)


def arrange(arguments: list[str], size: int) -> tuple[list[str], str]:
    """Fits the plan of a job, with what `shoal replan` has changed, to a number of ranks; see `fitted`."""
    job, _ = load_job(arguments[2], arguments[3:])
    change = kept(Path(job.run.dir))
    try:
        return fitted(job, size, change)
    except UserError as error:
        if not change:
            raise
        args, said = fitted(job, size)
        return args, f"the plan is that of the job file again: {error}. {said}".rstrip()


def start_script(program: list[str], nproc: int | None, roles: str | None = None) -> int:
    """Runs a script or module on `nproc` local ranks (see `launch`, `default_ranks`), or in `roles` as `start_job`;
    returns the exit code."""
    if roles is not None:
        return launch_roles(program, parse_roles(roles))
    return launch(program, nproc if nproc is not None else default_ranks())


def change_plan(run_dir: Path, assignments: Sequence[str]) -> None:
    """Has the run that trains in `run_dir` change its plan, and prints what it then is. Raises UserError where it
    refuses."""
    from shoal.jobs.replan import ask  # which imports torch

    answer = ask(run_dir, plan_assignments(assignments))
    print(f"after step {answer['step']} the plan is {plan_text(answer['plan'])}")


def text_assignment(key: str, text: str) -> str:
    """Returns "key=value" with `text` quoted, so that any text can be assigned."""
    return f"{key}={json.dumps(text)}"

"""A job for Ray's job server: the specification that its client and its REST interface take.

The entrypoint has Ray place the hosts of the job: nodes of `shoal train --nodes` for a job file, ranks of
`shoal.launch.ray` for a module. Where the ranks can only be those of one host, they are that of the entrypoint. All
hosts share this one's file system, as with Slurm.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from shoal.errors import UserError
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.script import script

GRACE = 120
"""Seconds that Ray gives a job to end after SIGTERM; its default is 3, in which ranks cannot save."""


def specification(request: Request, file: str | None = None) -> dict[str, Any]:
    """Returns the arguments of `JobSubmissionClient.submit_job`. file: the path of the job file; by default its own.
    Raises UserError for what takes one host, where there are more, and for variables that Ray would change."""
    cluster = request.cluster
    if not _one_host(request):
        _check_variables(cluster.env or {})
    variables = {**(cluster.env or {}), "RAY_JOB_STOP_WAIT_TIME_S": str(GRACE)}
    return {
        "entrypoint": f"exec bash -c {shlex.quote(script(cluster, _command(request, file), request.directory))}",
        "runtime_env": {"env_vars": variables},
        "metadata": {"job_name": request.name, "run_dir": str(request.record)},
        **(_reserved(request) if _one_host(request) else {}),
    }


def _check_variables(env: Mapping[str, str]) -> None:
    """Raises UserError for a value in which Ray would put other variables, which it does on each host anew
    (ray._private.utils.update_envs); it has no way to write a $ before a name."""
    for name, value in env.items():
        if found := re.search(r"\$(\{[^}]*\}|[A-Za-z_]\w*)", value, re.ASCII):
            raise UserError(
                f"cluster.env.{name} = {value!r}: Ray puts a variable of each host in place of {found[0]}, and cannot "
                "be told not to. Write out what it stands for"
            )


def _one_host(request: Request) -> bool:
    """Whether the ranks are those of the entrypoint's host. Raises UserError where there are more hosts."""
    several = request.cluster.hosts > 1
    if several and request.fixed:
        raise UserError(
            "run.at: hosts of Ray may come and go, and a plan by step needs them all. Leave out run.at, or set "
            "cluster.nodes=1"
        )
    if several and request.parameter_servers:
        raise UserError(
            f"ps_count = {request.parameter_servers}: on several hosts ranks average gradients among themselves, so "
            "there is nothing for parameter servers to do: leave ps_count out"
        )
    return not several and bool(request.module or request.fixed)


def _command(request: Request, file: str | None) -> list[str]:
    cluster = request.cluster
    if _one_host(request):
        return request.host(file)
    if not request.module:
        nodes = f"{cluster.least or cluster.hosts}:{cluster.hosts}"
        return [*request.rank(file), "--nproc", str(request.ranks), "--nodes", nodes]
    of_host: list[tuple[str, float | None]] = [("--cpus", cluster.cpus), ("--gpus", cluster.gpus)]
    of_host.append(("--memory", cluster.memory_bytes))
    shares = [word for name, amount in of_host if amount for word in (name, f"{amount / request.ranks:.12g}")]
    ranks = ["--ranks", str(request.ranks * cluster.hosts)]
    return ["python", "-m", "shoal.launch.ray", *ranks, *shares, "--", "-m", *request.module]


def _reserved(request: Request) -> dict[str, float]:
    """Returns what the entrypoint reserves of its host, where its ranks are there."""
    cluster = request.cluster
    asked: dict[str, float | None] = {
        "entrypoint_num_cpus": cluster.cpus,
        "entrypoint_num_gpus": cluster.gpus,
        "entrypoint_memory": cluster.memory_bytes,
    }
    return {name: value for name, value in asked.items() if value is not None}

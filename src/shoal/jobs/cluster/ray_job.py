"""A job for Ray's job server: the specification that its client and its REST interface take.

The entrypoint starts the ranks of one host there, which shares this host's file system, as with Slurm.
"""

from __future__ import annotations

import shlex
from typing import Any

from shoal.errors import UserError
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.script import script

GRACE = 120
"""Seconds that Ray gives a job to end after SIGTERM; its default is 3, in which ranks cannot save."""


def specification(request: Request, file: str | None = None) -> dict[str, Any]:
    """Returns the arguments of `JobSubmissionClient.submit_job`. file: the path of the job file; by default its own."""
    cluster = request.cluster
    if cluster.hosts > 1:
        raise UserError(
            f"cluster.nodes = {cluster.hosts}: a job of Ray begins on one host. Set cluster.nodes=1, or start ranks as "
            "actors in a script of your own"
        )
    asked = {
        "entrypoint_num_cpus": cluster.cpus,
        "entrypoint_num_gpus": cluster.gpus,
        "entrypoint_memory": cluster.memory_bytes,
    }
    return {
        "entrypoint": f"exec bash -c {shlex.quote(script(cluster, request.host(file), request.directory))}",
        "runtime_env": {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(GRACE)}},
        "metadata": {"job_name": request.name, "run_dir": str(request.record)},
        **{name: value for name, value in asked.items() if value is not None},
    }

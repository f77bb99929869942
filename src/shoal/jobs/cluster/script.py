"""The shell script of a job: its directory, variables and commands, around the one that trains."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import UserError
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.table import Cluster

_FORWARDED = """\
exec 8<> <(:) 9<> <(:)
started= early= code=
trap 'if [ -n "$started" ]; then kill -TERM "$started" 2>/dev/null || :; else early=1; fi' TERM INT
(trap : TERM INT; {run} && code=0 || code=$?; echo "$code" >&9) &
child=$!
until [ -n "$started" ] || ! kill -0 "$child" 2>/dev/null; do read -r -t 1 -u 8 started || :; done
[ -z "$early" ] || kill -TERM "$started" 2>/dev/null || :
until [ -n "$code" ] || ! kill -0 "$child" 2>/dev/null; do read -r -t 60 -u 9 code || :; done
[ -n "$code" ] || read -r -t 1 -u 9 code || code=137
exec 8>&- 9>&-
trap - TERM INT
[ "$code" -eq 0 ] || exit "$code\""""
"""Runs a command that gets the signals which bash gets meanwhile: bash by itself would keep them until it has ended.
Pipes tell in which process the command is started (see _STARTS) and what it ended with: `wait` ends early for each
signal, and a bash that has reaped the command meanwhile does not know its exit code any more."""
_STARTS = ["bash", "-c", 'echo $$ >&8; exec "$@" 8>&- 9>&-', "starts"]
"""Tells the process in which a command is started, to which signals go from then on. One that comes before is kept:
bash would lose it in its copy between fork and exec, and `timeout` would leave a command behind that it has just
started."""


def script(cluster: Cluster, command: Sequence[str], directory: Path | None = None) -> str:
    """Returns a script that runs `command` between the cluster's `setup` and `finish`.

    It ends with the first command that fails, with its exit code. SIGTERM reaches the ranks, which save a checkpoint.
    directory: where it runs; by default where it is started.
    """
    limit, begins = limited(cluster), beginning(cluster, directory)
    if not cluster.finish and not limit:
        return "\n".join([*begins, f"exec {shlex.join(command)}", ""])
    run = shlex.join([*limit, *_STARTS, *command])
    return "\n".join([*begins, _FORWARDED.replace("{run}", run), *(cluster.finish or []), ""])


def beginning(cluster: Cluster, directory: Path | None) -> list[str]:
    """Returns the lines before the command that trains."""
    there = [] if directory is None else [f"cd {shlex.quote(str(directory))}"]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in (cluster.env or {}).items()]
    return ["#!/bin/bash", "set -e", *there, *exports, *(cluster.setup or [])]


def limited(cluster: Cluster) -> list[str]:
    """Returns the command that ends another one after `cluster.time`, where no scheduler does."""
    return [] if cluster.seconds is None else ["timeout", "--kill-after=60", str(cluster.seconds)]


def local_script(request: Request, file: str | None = None) -> str:
    """Returns the script of a run on this host. Raises UserError where the job asks for more."""
    if request.cluster.hosts > 1:
        key = "worker_count" if request.module else "cluster.nodes"
        remedy = "worker_count = 1" if request.module else "--set cluster.nodes=1"
        raise UserError(f"{key} = {request.cluster.hosts}, and this is one host: give {remedy}")
    return script(request.cluster, request.host(file), request.directory)

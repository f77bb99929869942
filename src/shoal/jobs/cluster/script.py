"""The shell script of a job: its directory, variables and commands, around the one that trains."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import UserError
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.table import Cluster

_LISTEN = """\
child= early=
tell() { kill -TERM -- "-$child" 2>/dev/null || kill -TERM "$child" 2>/dev/null || :; }
trap 'if [ -n "$child" ]; then tell; else early=1; fi' TERM INT  # bash would keep the signal"""
_FORWARD = """\
child=$!
[ -z "$early" ] || tell
wait "$child" && code=0 || code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child" && code=0 || code=$?; done
while kill -0 -- "-$child" 2>/dev/null; do sleep 0.1; done
[ "$code" -eq 0 ] || exit "$code\""""
"""Before and after the command that trains: signals are passed on to it, also one that comes while it starts.

`timeout` leads a process group, which is told as a whole and waited for: a signal that comes before it has noted its
child's number ends it alone, and the ranks would go on without anybody.
"""


def script(cluster: Cluster, command: Sequence[str], directory: Path | None = None) -> str:
    """Returns a script that runs `command` between the cluster's `setup` and `finish`.

    It ends with the first command that fails, with its exit code. SIGTERM reaches the ranks, which save a checkpoint.
    directory: where it runs; by default where it is started.
    """
    run = shlex.join([*limited(cluster), *command])
    if not cluster.finish and cluster.seconds is None:
        return "\n".join([*beginning(cluster, directory), f"exec {run}", ""])
    return "\n".join([*beginning(cluster, directory), _LISTEN, f"{run} &", _FORWARD, *(cluster.finish or []), ""])


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
        raise UserError(f"cluster.nodes = {request.cluster.hosts}, and this is one host: give --set cluster.nodes=1")
    return script(request.cluster, request.host(file), request.directory)

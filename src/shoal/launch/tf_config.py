"""TF_CONFIG, as TensorFlow's launchers and Kubeflow's TFJob set it: read for a rank, and written for local children.

    {"cluster": {"chief": ["host:port"], "worker": ["host:port", ...], "ps": [...], "evaluator": [...]},
     "task": {"type": "worker", "index": 0}}

The chief (once called master) is rank 0 and serves the store at its address, the workers follow. The evaluator, which
the cluster need not name, is no rank, and neither is a parameter server.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

from shoal.errors import LaunchError, UserError, did_you_mean
from shoal.launch.identity import Identity, meeting
from shoal.plan import MOST_RANKS_OF_A_HOST

VARIABLE = "TF_CONFIG"
TRAINERS = ("chief", "master", "worker")
ROLES = (*TRAINERS, "ps", "evaluator")
Cluster = dict[str, list[str]]
"""The addresses, host:port, of the tasks of each role."""
Task = tuple[str, int]
"""A role, and the number of the task among those of its role."""


def identity(environ: Mapping[str, str]) -> Identity | None:
    """Returns the Identity of this task; None where TF_CONFIG is absent or describes one process.

    Raises UserError for a description that is invalid.
    """
    text = environ.get(VARIABLE, "")
    if not text.strip():
        return None
    cluster, task = _read(text)
    role, index = task
    ranks, servers = trainers(cluster), tuple(_address(each, "ps") for each in cluster.get("ps", ()))
    if role == "evaluator":
        return Identity(0, 1, 0, 1, "", 0, VARIABLE, evaluates=True)
    if role == "ps":
        return Identity(0, len(ranks), 0, 1, "", 0, VARIABLE, servers=servers, serves=index)
    if len(ranks) <= 1:
        return Identity(0, 1, 0, 1, "", 0, VARIABLE, servers=servers) if servers else None
    found = Identity(ranks.index(task), len(ranks), None, None, "", 0, VARIABLE, servers=servers)
    first, number = ranks[0]
    return meeting(found, f"tcp://{_address(cluster[first][number], f'first {first}')}", rank0_serves=True)


def trainers(cluster: Cluster) -> list[Task]:
    """Returns the tasks that train, in the order of their ranks."""
    return [(role, number) for role in TRAINERS for number in range(len(cluster.get(role, ())))]


def written(cluster: Cluster, task: Task) -> str:
    """Returns the TF_CONFIG of a task."""
    return json.dumps({"cluster": cluster, "task": {"type": task[0], "index": task[1]}})


def parse_roles(text: str) -> dict[str, int]:
    """Returns the number of tasks of each role: "ps=1,worker=3" -> {"ps": 1, "worker": 3}. Raises UserError for another
    text."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        role, equals, count = (each.strip() for each in part.partition("="))
        if role not in ROLES:
            meant = did_you_mean(role, list(ROLES))
            raise UserError(f"--roles {text}: unknown role {role!r}.{meant} Roles: {', '.join(ROLES)}")
        number = int(count) if count.isdecimal() and len(count) < 9 else 0
        if not (equals and 0 < number <= MOST_RANKS_OF_A_HOST) or role in counts:
            raise UserError(
                f"--roles {text:.100}: give each role once with a number from 1 to {MOST_RANKS_OF_A_HOST}, e.g. "
                "worker=3,evaluator=1"
            )
        counts[role] = number
    _check({role: [""] * count for role, count in counts.items()}, f"--roles {text}")
    return counts


def local_cluster(counts: Mapping[str, int]) -> Cluster:
    """Returns a cluster of tasks on this host, each with a port of its own that is free now. Raises LaunchError where
    there are not as many."""
    with ExitStack() as probes:

        def free() -> str:
            probe = probes.enter_context(socket.create_server(("127.0.0.1", 0)))
            return f"127.0.0.1:{probe.getsockname()[1]}"

        try:
            return {role: [free() for _ in range(count)] for role, count in counts.items()}
        except OSError as error:
            raise LaunchError(
                f"{sum(counts.values())} processes on this host need as many free ports: {error}. Try fewer, or raise "
                "the limit of open files (ulimit -n)"
            ) from error


def _read(text: str) -> tuple[Cluster, Task]:
    try:
        content = _object("it", json.loads(text))
        cluster = {role: _texts(role, tasks) for role, tasks in _object("cluster", content.get("cluster", {})).items()}
        task = _object("task", content.get("task", {}))
        role, index = str(task.get("type")), _index(task.get("index", 0))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"TF_CONFIG={text!r} is no description of a cluster ({error}). Unset it for a single process."
        ) from error
    if not cluster:
        return {"worker": [""]}, ("worker", 0)
    _check(cluster, "TF_CONFIG")
    among = len(cluster.get(role, ())) or (role == "evaluator")  # which need not be in the cluster
    if role not in ROLES or not 0 <= index < among:
        raise UserError(
            f"TF_CONFIG says task {role} {index}, and its cluster has "
            f"{', '.join(f'{each} 0 to {len(tasks) - 1}' for each, tasks in cluster.items() if tasks) or 'no tasks'}. "
            f"Give each process the type and the index of one of them in TF_CONFIG, or unset it for a single process."
        )
    return cluster, (role, index)


def _object(name: str, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise TypeError(f"{name} is no JSON object")
    return content


def _index(given: object) -> int:
    """Returns the number of a task, which some launchers write as a text."""
    if not re.fullmatch(r"-?[0-9]+", str(given)):
        raise TypeError(f"the index of the task, {given!r}, is no whole number")
    return int(str(given))


def _texts(role: str, tasks: object) -> list[str]:
    if not isinstance(tasks, list):
        raise TypeError(f"{role} is no list of addresses")
    return [str(each) for each in tasks]


def _check(cluster: Mapping[str, list[str]], where: str) -> None:
    """Raises UserError for a cluster that nobody can lead, or that has several leaders or evaluators."""
    if not any(cluster.get(role) for role in TRAINERS):
        raise UserError(f'{where}: nobody trains. Give at least one worker: worker=2, or "worker": ["host:2222"].')
    for roles in (("chief", "master"), ("evaluator",)):
        if sum(len(cluster.get(role, ())) for role in roles) > 1:
            many = " or ".join(roles)
            raise UserError(f"{where}: there is more than one {many}. Give at most one; what else trains is a worker.")


def _address(address: str, role: str) -> str:
    """Returns host:port, where the task `role` listens."""
    try:
        parts = urlsplit(f"tcp://{address}")
        if parts.hostname and parts.port:
            return address
    except ValueError:
        pass
    raise UserError(f"TF_CONFIG: the address of the {role}, {address!r}, is not host:port, e.g. 10.0.0.1:2222.")

"""A job's pods: container, variables, volumes. One pod is one host.

A pod with one rank is a rank, by RANK; the ranks of a pod with several are torchrun's to start, which reads PET_*.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from shoal.errors import UserError
from shoal.jobs.cluster.request import Request
from shoal.jobs.cluster.script import script

Document = dict[str, Any]

FOLDER, FILE = "/etc/shoal", "job.toml"
PORT = "29500"
GPU = "nvidia.com/gpu"
GRACE = 120
"""Seconds that a pod has to save a checkpoint after SIGTERM."""
HOPELESS = [2, 3, 5]
"""Exit codes after which a retry changes nothing: a wrong job, a loss that is not finite, no good checkpoint."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""What Kubernetes takes as the name of a claim, a Secret or a queue."""


def check(request: Request) -> None:
    """Raises UserError where pods cannot run the request, or would lose what they train."""
    cluster = request.cluster
    if not cluster.image:
        key = "docker_image" if request.module else "cluster.image"
        name = key.rpartition(".")[2]
        raise UserError(f'{key} is missing: name an image with shoal and the job\'s data, e.g. {name} = "lab/shoal"')
    if request.parameter_servers:
        raise UserError(
            f"ps_count = {request.parameter_servers}: ranks average gradients among themselves, so there is nothing "
            "for parameter servers to do: leave ps_count out"
        )
    _check_names(request)
    where = PurePosixPath(request.run_dir)
    if request.file and not any(where.is_relative_to(path) for path in (cluster.volumes or {}).values()):
        raise UserError(
            f'run.dir = "{request.run_dir}" ends with its pod: mount a claim, e.g. cluster.volumes = {{training = '
            f'"/data"}}, and give a run.dir below it, "/data/{request.run_dir.name}"'
        )


def _check_names(request: Request) -> None:
    """Raises UserError for what Kubernetes would refuse, or never find."""
    cluster = request.cluster
    claims = [(f"volumes: {claim!r}", claim) for claim in cluster.volumes or {}]
    others = [(f"{key} = {value!r}", value) for key in ("secret", "queue") if (value := getattr(cluster, key))]
    for what, name in (*claims, *others):
        if not _NAME.fullmatch(name):
            raise UserError(
                f"cluster.{what} is no name in Kubernetes: give one of lower-case letters, digits, - and ., which "
                "begins and ends with a letter or digit"
            )
    if any(c.isspace() for c in cluster.image or ""):
        raise UserError(f'cluster.image = {cluster.image!r}: a name of an image has no blanks, e.g. "lab/shoal:1"')
    places = dict.fromkeys((FOLDER, "/dev/shm"), "the job itself")
    for claim, path in (cluster.volumes or {}).items():
        place = str(PurePosixPath(path))
        if ":" in path or place in places:
            why = "a path with : is refused by Kubernetes" if ":" in path else f"it is that of {places[place]}, too"
            raise UserError(f"cluster.volumes.{claim} = {path!r}: {why}. Give another path")
        places[place] = claim
    for name in {each["name"] for each in meeting(request, "")} & set(cluster.env or {}):
        raise UserError(f"cluster.env.{name}: the pods find each other by it, and have it already: leave it out")


def pod_spec(request: Request, first: str, container: str) -> Document:
    """Returns a pod's spec. first: the host name of the first pod; container: the name of the container."""
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "containers": [
            {
                "name": container,
                "image": request.cluster.image,
                "command": command(request),
                "env": [*variables(request), *meeting(request, first)],
                "resources": resources(request),
                "volumeMounts": mounts(request),
            }
        ],
        "volumes": volumes(request),
    }


def command(request: Request, torchrun: bool = False) -> list[str]:
    """Returns what a container runs. torchrun: also starts the one rank of a pod."""
    file = f"{FOLDER}/{FILE}"
    if request.cluster.hosts == 1 and not torchrun:
        run = request.host(file)
    elif request.ranks == 1 and not torchrun:
        run = request.rank(file)
    else:
        program = ["-m", *request.module] if request.module else ["--no-python", *request.rank(file)]
        run = ["torchrun", *program]
    if request.cluster.setup or request.cluster.finish:
        run = ["bash", "-c", script(_without_time(request).cluster, run)]
    return [_literal(word) for word in run]


def _without_time(request: Request) -> Request:
    """Returns the request without what Kubernetes itself does: the time limit and the variables."""
    return replace(request, cluster=replace(request.cluster, time=None, env=None))


def variables(request: Request) -> list[Document]:
    """Returns the job's own variables, and the ranks' secret out of a Secret."""
    given = [{"name": name, "value": _literal(value)} for name, value in (request.cluster.env or {}).items()]
    secret = {"name": secret_name(request), "key": "secret"}
    return [*given, {"name": "SHOAL_SECRET", "valueFrom": {"secretKeyRef": secret}}]


def _literal(text: str) -> str:
    """Returns `text` such that a container gets it as it is: Kubernetes makes $$ a $, and puts a variable of the
    container in place of $(NAME)."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def meeting(request: Request, first: str) -> list[Document]:
    """Returns the variables by which the ranks of several pods find each other."""
    hosts, ranks = request.cluster.hosts, request.ranks
    if hosts == 1:
        return []
    index = {"valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    if ranks == 1:
        return [{"name": "RANK", **index}, *_plain(WORLD_SIZE=str(hosts), MASTER_ADDR=first, MASTER_PORT=PORT)]
    nodes = _plain(PET_NNODES=str(hosts), PET_NPROC_PER_NODE=str(ranks))
    return [*nodes, {"name": "PET_NODE_RANK", **index}, *_plain(PET_MASTER_ADDR=first, PET_MASTER_PORT=PORT)]


def _plain(**values: str) -> list[Document]:
    return [{"name": name, "value": value} for name, value in values.items()]


def secret_name(request: Request) -> str:
    return request.cluster.secret or request.name


def resources(request: Request) -> Document:
    """Returns what a pod asks for and gets at most."""
    cluster = request.cluster
    asked = {
        "cpu": None if cluster.cpus is None else f"{round(cluster.cpus * 1000)}m",
        "memory": None if cluster.memory_bytes is None else f"{cluster.memory_bytes // 2**20}Mi",
        GPU: None if cluster.gpus is None else str(cluster.gpus),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return {"requests": given, "limits": dict(given)} if given else {}


def mounts(request: Request) -> list[Document]:
    """Returns where the volumes are: claims, the job file, and shared memory, of which containers have 64 MiB."""
    claims = [
        {"name": f"claim-{n}", "mountPath": path} for n, path in enumerate((request.cluster.volumes or {}).values())
    ]
    file = [{"name": "job", "mountPath": FOLDER, "readOnly": True}] if request.file else []
    return [*claims, *file, {"name": "shared-memory", "mountPath": "/dev/shm"}]


def volumes(request: Request) -> list[Document]:
    """Returns the volumes of `mounts`."""
    claims = [
        {"name": f"claim-{n}", "persistentVolumeClaim": {"claimName": claim}}
        for n, claim in enumerate(request.cluster.volumes or {})
    ]
    file = [{"name": "job", "configMap": {"name": request.name}}] if request.file else []
    return [*claims, *file, {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]


def labels(request: Request) -> dict[str, str]:
    return {"app.kubernetes.io/name": "shoal", "app.kubernetes.io/instance": request.name}


def metadata(request: Request) -> Document:
    """Returns the metadata of the document that a queue takes in."""
    queue = request.cluster.queue
    kueue = {} if queue is None else {"kueue.x-k8s.io/queue-name": queue}
    return {"name": request.name, "labels": labels(request) | kueue}


def job_file(request: Request) -> Sequence[Document]:
    """Returns the ConfigMap with the job file; nothing for a module."""
    if request.file is None:
        return []
    text = request.file.read_text(encoding="utf-8")
    meta = {"name": request.name, "labels": labels(request)}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {FILE: text}}]

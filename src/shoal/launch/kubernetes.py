"""Ranks that are pods of Kubernetes: an Indexed Job, alone or in a JobSet, and the TrainJob and PyTorchJob of Kubeflow.

An Indexed Job numbers its pods and says no more: WORLD_SIZE and MASTER_ADDR come from its YAML. A TrainJob gives
torchrun's settings (PET_*), which describe nodes: one with one process is a rank, others are torchrun's to start.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import UserError
from shoal.launch.identity import DEFAULT_PORT, Identity, Names, meeting, numbers, port_in

_INDEX = "JOB_COMPLETION_INDEX"
_INDEXED = (Names("Kubernetes", _INDEX, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "MASTER_ADDR", "MASTER_PORT")
_NODE = (
    Names("Kubernetes", "PET_NODE_RANK", "PET_NNODES", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
)
MARKS = ("PET_NNODES", _INDEX)


def identity(environ: Mapping[str, str]) -> Identity | None:
    """Returns the Identity of a pod that is a rank; None for another process.

    Raises UserError where the pod's number is known, but not how many there are or where rank 0 is.
    """
    if "PET_NNODES" in environ:
        if environ.get("PET_NPROC_PER_NODE", "1") != "1" or "PET_NODE_RANK" not in environ:
            raise _for_torchrun(environ)
        names, host, port = _NODE
    elif _INDEX in environ:
        names, host, port = _INDEXED
        if names.size not in environ:
            raise UserError(
                f"{_INDEX}={environ[_INDEX]}: this is a pod of an Indexed Job, which does not say how many there are. "
                "Set WORLD_SIZE in its YAML to spec.completions and MASTER_ADDR to the name of its first pod "
                "(job-0.service), or WORLD_SIZE=1 where each pod trains by itself."
            )
    else:
        return None
    found = numbers(names, environ)
    if found.size > 1 and not environ.get(host):
        raise UserError(
            f"{names.rank}={found.rank}: rank {found.rank} of {found.size} does not know the host of rank 0. Set "
            f"{host} in the YAML to the name of the first pod: job-0.service, in a JobSet jobset-job-0-0.jobset."
        )
    return meeting(found, f"tcp://{environ.get(host)}:{port_in(environ, port) or DEFAULT_PORT}", rank0_serves=True)


def refuse_nodes(environ: Mapping[str, str]) -> None:
    """Raises UserError where RANK counts pods of several processes each, as a PyTorchJob sets it."""
    per_node = environ.get("PET_NPROC_PER_NODE", "1")
    if "TORCHELASTIC_RUN_ID" not in environ and per_node.isdecimal() and per_node != "1":
        raise _for_torchrun(environ)


def _for_torchrun(environ: Mapping[str, str]) -> UserError:
    nodes, per_node = environ.get("PET_NNODES", "1"), environ.get("PET_NPROC_PER_NODE", "1")
    return UserError(
        f"PET_NNODES={nodes} PET_NPROC_PER_NODE={per_node}: this pod is a node whose ranks torchrun starts, which "
        "reads these variables. Have the container run `torchrun --no-python shoal train job.toml`, or torchrun and "
        "your script; or give the job a fixed number of nodes with one process each."
    )

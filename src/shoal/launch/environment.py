"""The rank of this process and the address of the store, from a URL or from the variables that a launcher sets.

    discover(environ, init) -> Identity            a pure function; nothing is contacted

The sources are tried in this order; the first that is present decides (docs/launch.md has a table of what each sets):

    init        a URL in the script: tcp://host:port?rank=0&size=4, file:///path?rank=0&size=4, or env:// (the rest of
                this list)
    SHOAL_*     `shoal run` and `shoal train`
    RANK        torchrun, Ray, PyTorchJob of Kubeflow, or variables set by hand
    MPI         Open MPI, MVAPICH, MPICH and Intel MPI; before Slurm, since under `mpirun` in an allocation SLURM_PROCID
                counts mpirun's own daemons
    Slurm       a task of `srun`; the script of sbatch has SLURM_PROCID too, but is not a step: it is a single process
    Kubernetes  a pod of an Indexed Job, alone, in a JobSet or in a TrainJob of Kubeflow
    TF_CONFIG   a task of a cluster with the roles chief, master, worker, ps and evaluator
    none        a single process
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

from shoal.comm.address import host_port
from shoal.errors import UserError
from shoal.launch import kubernetes, mpi, slurm, tf_config
from shoal.launch.identity import PLAIN, SINGLE, Identity, Names, meeting, number, numbers, port_in

SHOAL = Names("shoal run", "SHOAL_RANK", "SHOAL_SIZE", "SHOAL_LOCAL_RANK", "SHOAL_LOCAL_SIZE")
RAY = "Ray"
"""The source of ranks of `shoal.launch.ray`, which have torchrun's variables."""
MARKS = (
    *(SHOAL.rank, "SHOAL_STORE", PLAIN.rank, PLAIN.size),
    *(names.rank for names in (*mpi.NAMES, slurm.NAMES)),
    *kubernetes.MARKS,
)
"""The variables by which a process knows itself as a rank. One without them goes by TF_CONFIG, or is alone."""


def discover(environ: Mapping[str, str] = os.environ, init: str | None = None) -> Identity:
    """Returns the Identity from `init` or from the variables.

    Raises UserError that names the missing, invalid or contradictory variables.
    """
    if init is not None and not init.startswith("env:"):
        return _from_url(init)
    if SHOAL.rank in environ or "SHOAL_STORE" in environ:
        return _from_shoal(environ)
    if PLAIN.rank in environ:
        return _from_plain(environ)
    for source in (mpi, slurm, kubernetes, tf_config):
        if (found := source.identity(environ)) is not None:
            return _agreeing(found, environ) if found.trains else found
    if environ.get(PLAIN.size, "1") != "1":
        raise UserError(
            f"WORLD_SIZE={environ[PLAIN.size]} is set but RANK is not. Set both, or unset WORLD_SIZE for a single "
            "process."
        )
    return SINGLE


def _from_url(url: str) -> Identity:
    parts = urlsplit(url)
    example = "tcp://10.0.0.1:29500?rank=0&size=4, file:///shared/run7?rank=0&size=4 or env://"
    try:
        port = parts.port
    except ValueError as error:
        raise UserError(f"init={url!r}: {error}. Write it like {example}.") from error
    if parts.scheme == "tcp" and parts.hostname and port:
        store_url = f"tcp://{host_port(parts.hostname, port)}"
    elif parts.scheme == "file" and parts.path.strip("/") and parts.netloc in ("", "localhost"):
        store_url = f"file://{parts.path}"
    else:
        raise UserError(f"init={url!r} is no address of a store. Write it like {example}.")
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    query.setdefault("size", query.get("world_size", ""))  # torch's name for it
    names = Names(f"init={url!r}", "rank", "size", "local_rank", "local_size")
    found = replace(numbers(names, {k: v for k, v in query.items() if v}), source=f"{parts.scheme}://")
    return meeting(found, store_url, rank0_serves=parts.scheme == "tcp")


def _from_shoal(environ: Mapping[str, str]) -> Identity:
    found = numbers(SHOAL, environ)
    if "SHOAL_STORE" not in environ:
        raise UserError(
            "SHOAL_RANK is set but SHOAL_STORE is not: unset the SHOAL_* variables, or start with `shoal run`."
        )
    for ours, theirs in ((SHOAL.rank, PLAIN.rank), (SHOAL.size, PLAIN.size)):
        if environ.get(theirs, environ[ours]) != environ[ours]:
            raise UserError(
                f"{ours}={environ[ours]} but {theirs}={environ[theirs]}: two launchers contradict each other. "
                f"Do not start torchrun or another launcher inside `shoal run`."
            )
    return replace(found, store_url=environ["SHOAL_STORE"], generation=number(environ, "SHOAL_GENERATION") or 0)


def _from_plain(environ: Mapping[str, str]) -> Identity:
    kubernetes.refuse_nodes(environ)
    found = numbers(PLAIN, environ)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing and found.size > 1:
        raise UserError(
            f"RANK={found.rank} and WORLD_SIZE={found.size} are set but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not. Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a "
            "free port there."
        )
    store_url = "" if missing else f"tcp://{environ['MASTER_ADDR']}:{port_in(environ, 'MASTER_PORT')}"
    agent_serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    marks = {"TORCHELASTIC_RUN_ID": "torchrun", "SHOAL_RAY": RAY}
    found = replace(
        found,
        source=next((source for mark, source in marks.items() if mark in environ), PLAIN.source),
        generation=number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
    )
    return meeting(found, store_url, rank0_serves=not agent_serves)


def _agreeing(identity: Identity, environ: Mapping[str, str]) -> Identity:
    """Returns `identity`. Raises UserError where WORLD_SIZE alone, as job scripts export it, contradicts it."""
    if environ.get(PLAIN.size, str(identity.size)) != str(identity.size):
        raise UserError(
            f"WORLD_SIZE={environ[PLAIN.size]} but {identity.source} started {identity.size} ranks. Unset WORLD_SIZE, "
            "or set RANK and WORLD_SIZE both."
        )
    return identity

"""The rank of this process and the address of the store, from a URL or from the variables that a launcher sets.

    discover(environ, init) -> Identity            a pure function; nothing is contacted

The sources are tried in this order; the first that is present decides:

    init        a URL in the script: tcp://host:port?rank=0&size=4, file:///path?rank=0&size=4, or env:// (the rest of
                this list)
    SHOAL_*     `shoal run` and `shoal train`
    RANK        torchrun, or variables set by hand
    MPI         Open MPI, MVAPICH, MPICH and Intel MPI; before Slurm, since under `mpirun` in an allocation SLURM_PROCID
                counts mpirun's own daemons
    Slurm       a task of `srun`; the script of sbatch has SLURM_PROCID too, but is not a step: it is a single process
    none        a single process; TF_CONFIG with more tasks is refused, with the variables to set instead
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, urlsplit

from shoal.errors import UserError

DEFAULT_PORT = 29500  # torch's default; only for ranks that are all on one host


@dataclass(frozen=True)
class Identity:
    """The rank of this process among the ranks.

    local_rank, local_size: None where only the host names of the other ranks can tell.
    store_url: tcp://host:port, file:///path, or empty for a single process.
    generation: number of restarts so far; part of the keys in the store.
    source: where this was read, for messages.
    rank0_serves: rank 0 opens the TCP store, because no launcher did.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    store_url: str
    generation: int
    source: str
    rank0_serves: bool = False


@dataclass(frozen=True)
class Names:
    """The names of the variables in which one launcher gives a process its rank."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str


SHOAL = Names("shoal run", "SHOAL_RANK", "SHOAL_SIZE", "SHOAL_LOCAL_RANK", "SHOAL_LOCAL_SIZE")
PLAIN = Names("the environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = (
    Names("Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Names("MVAPICH", *(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    Names("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
SLURM = Names("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_HERE")
SINGLE = Identity(0, 1, 0, 1, "", 0, "single process")


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
    slurm_step = "SLURM_PROCID" in environ and any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEPID"))
    for names in MPI:
        srun_speaks_pmi = slurm_step and names.rank == "PMI_RANK" and environ.get(names.rank) == environ["SLURM_PROCID"]
        if names.rank in environ and not srun_speaks_pmi:
            return _agreeing(_from_mpi(names, environ), environ)
    if slurm_step:
        return _agreeing(_from_slurm(environ), environ)
    if environ.get(PLAIN.size, "1") != "1":
        raise UserError(
            f"WORLD_SIZE={environ[PLAIN.size]} is set but RANK is not. Set both, or unset WORLD_SIZE for a single "
            "process."
        )
    if environ.get("TF_CONFIG", "").strip():
        _refuse_tasks(environ["TF_CONFIG"])
    return SINGLE


def _refuse_tasks(text: str) -> None:
    """Raises UserError for a TF_CONFIG that is invalid or has several tasks, each of which would train alone."""
    try:
        content = json.loads(text)
        cluster = {kind: list(tasks) for kind, tasks in content.get("cluster", {}).items()}
        kind, index = content.get("task", {}).get("type"), int(content.get("task", {}).get("index", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"TF_CONFIG={text!r} is no description of a cluster ({error}). Unset it for a single process."
        ) from error
    if sum(map(len, cluster.values())) <= 1:
        return
    trains = [(each, number) for each in ("chief", "master", "worker") for number in range(len(cluster.get(each, ())))]
    if (kind, index) not in trains:
        instead = "Start it on the chief and the workers alone, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    else:
        first, number = trains[0]
        host, _, port = str(cluster[first][number]).rpartition(":")
        instead = (
            f"Set RANK={trains.index((kind, index))} WORLD_SIZE={len(trains)} MASTER_ADDR={host or port} "
            f"MASTER_PORT={port if host else DEFAULT_PORT} in its place"
        )
    raise UserError(
        f"TF_CONFIG says task {kind} {index} of {sum(map(len, cluster.values()))}, which Shoal does not take its ranks "
        f"from yet: each task would train alone on all data. {instead}, or unset TF_CONFIG for a single process."
    )


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list: "node[003-005,9],x1" -> "node003". Raises UserError for others."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist)
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group()) if first else ""
    if not re.fullmatch(r"[\w.-]+", host):
        raise UserError(
            f"SLURM_STEP_NODELIST={nodelist!r} is no list of hosts like node[1-4]. Set MASTER_ADDR to the first host."
        )
    return host


def _from_url(url: str) -> Identity:
    parts = urlsplit(url)
    example = "tcp://10.0.0.1:29500?rank=0&size=4, file:///shared/run7?rank=0&size=4 or env://"
    try:
        port = parts.port
    except ValueError as error:
        raise UserError(f"init={url!r}: {error}. Write it like {example}.") from error
    if parts.scheme == "tcp" and parts.hostname and port:
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        store_url = f"tcp://{host}:{port}"
    elif parts.scheme == "file" and parts.path.strip("/") and parts.netloc in ("", "localhost"):
        store_url = f"file://{parts.path}"
    else:
        raise UserError(f"init={url!r} is no address of a store. Write it like {example}.")
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    query.setdefault("size", query.get("world_size", ""))  # torch's name for it
    names = Names(f"init={url!r}", "rank", "size", "local_rank", "local_size")
    found = replace(_numbers(names, {k: v for k, v in query.items() if v}), source=f"{parts.scheme}://")
    return _meeting(found, store_url, rank0_serves=parts.scheme == "tcp")


def _from_shoal(environ: Mapping[str, str]) -> Identity:
    found = _numbers(SHOAL, environ)
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
    return replace(found, store_url=environ["SHOAL_STORE"], generation=_number(environ, "SHOAL_GENERATION") or 0)


def _from_plain(environ: Mapping[str, str]) -> Identity:
    found = _numbers(PLAIN, environ)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing and found.size > 1:
        raise UserError(
            f"RANK={found.rank} and WORLD_SIZE={found.size} are set but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not. Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a "
            "free port there."
        )
    store_url = "" if missing else f"tcp://{environ['MASTER_ADDR']}:{_number(environ, 'MASTER_PORT')}"
    agent_serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    found = replace(
        found,
        source="torchrun" if "TORCHELASTIC_RUN_ID" in environ else PLAIN.source,
        generation=_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
    )
    return _meeting(found, store_url, rank0_serves=not agent_serves)


def _from_mpi(names: Names, environ: Mapping[str, str]) -> Identity:
    found = _numbers(names, environ)
    one_host = found.local_size == found.size
    if not one_host and "MASTER_ADDR" not in environ:
        raise UserError(
            f"{names.source}: rank {found.rank} of {found.size} does not know the host of rank 0. "
            f"Give it to every rank, e.g. MASTER_ADDR=$(hostname) MASTER_PORT={DEFAULT_PORT} before mpirun "
            "(Open MPI: and -x MASTER_ADDR -x MASTER_PORT)."
        )
    return _meeting(found, _store_at(environ, "127.0.0.1", DEFAULT_PORT), rank0_serves=True)


def _from_slurm(environ: Mapping[str, str]) -> Identity:
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_NTASKS_PER_NODE", ""))
    here = _tasks_on_node(tasks, environ.get("SLURM_NODEID", "0"))
    step = {"SLURM_NTASKS": environ.get("SLURM_STEP_NUM_TASKS", ""), SLURM.local_size: here}
    found = _numbers(SLURM, {**environ, **{name: value for name, value in step.items() if value}})
    nodelist = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if found.local_size == found.size else first_host(nodelist))
    job = _number(environ, "SLURM_JOB_ID") or 0
    step_id = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "0"))
    # Linux takes ephemeral ports from above 10000-29999; the steps of a job get ports of their own
    port = 10000 + (16 * job + (int(step_id) if step_id.isdecimal() else 0)) % 20000
    return _meeting(found, _store_at(environ, host, port), rank0_serves=True)


def _tasks_on_node(tasks_per_node: str, node: str) -> str:
    """Returns the number of tasks on a node of Slurm's compressed list: ("4(x2),1", "2") -> "1"; empty if unknown."""
    counts = [
        m[1]
        for part in tasks_per_node.split(",")
        if (m := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part))
        for _ in range(int(m[2] or 1))
    ]
    if len(counts) == 1 and "(" not in tasks_per_node:
        return counts[0]
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else ""


def _store_at(environ: Mapping[str, str], host: str, port: int) -> str:
    return f"tcp://{environ.get('MASTER_ADDR', host)}:{_number(environ, 'MASTER_PORT') or port}"


def _agreeing(identity: Identity, environ: Mapping[str, str]) -> Identity:
    """Returns `identity`. Raises UserError where WORLD_SIZE alone, as job scripts export it, contradicts it."""
    if environ.get(PLAIN.size, str(identity.size)) != str(identity.size):
        raise UserError(
            f"WORLD_SIZE={environ[PLAIN.size]} but {identity.source} started {identity.size} ranks. Unset WORLD_SIZE, "
            "or set RANK and WORLD_SIZE both."
        )
    return identity


def _meeting(found: Identity, store_url: str, rank0_serves: bool) -> Identity:
    """Returns `found` with the store where its ranks meet."""
    if found.size == 1 and rank0_serves:
        store_url = ""  # a store for rank 0 alone would only occupy a port
    return replace(found, store_url=store_url, rank0_serves=rank0_serves and bool(store_url))


def _numbers(names: Names, environ: Mapping[str, str]) -> Identity:
    """Returns an Identity without a store, from the four variables of `names`; the local two may be absent."""
    rank, size = _number(environ, names.rank), _number(environ, names.size)
    if rank is None or size is None:
        have, miss = (names.size, names.rank) if rank is None else (names.rank, names.size)
        although = f" although {have}={environ[have]}" if have in environ else ""
        raise UserError(f"{names.source}: {miss} is missing{although}. Give both.")
    local_rank, local_size = _number(environ, names.local_rank), _number(environ, names.local_size)
    if size == 1:
        local_rank, local_size = local_rank or 0, 1
    for low, low_name, high, high_name in (
        (rank, names.rank, size, names.size),
        (local_rank, names.local_rank, local_size, names.local_size),
        (None if local_size is None else local_size - 1, names.local_size, size, names.size),
    ):
        if low is not None and high is not None and low >= high:
            bound = "at most" if low_name == names.local_size else "below"
            raise UserError(
                f"{names.source}: {low_name}={environ.get(low_name, low)} must be {bound} "
                f"{high_name}={environ.get(high_name, high)}."
            )
    return Identity(rank, size, local_rank, local_size, "", 0, names.source)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name)
    if value is None:
        return None
    if not value.isdecimal():
        raise UserError(f"{name}={value!r} is not a whole number from 0 up.")
    return int(value)

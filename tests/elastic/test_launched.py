"""Nodes that another launcher starts: what each is told, and jobs of a real Slurm that lose them or begin again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.elastic.launched import Started, as_node
from shoal.errors import UserError
from shoal.report.metrics import read_metrics
from tests.elastic.test_nodes import JOB
from tests.launch.conftest import SHOAL
from tests.launch.conftest import place as place
from tests.launch.conftest import run as run
from tests.launch.conftest import start as start
from tests.launch.slurm import Slurm, cluster
from tests.launch.test_slurm import wait_for_step

SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}
SLURM |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[01-02]", "SLURM_NODEID": "1"}
SECRET = {"SHOAL_SECRET": "the secret of these tests"}


@pytest.mark.fast
def test_the_processes_of_launchers_as_nodes(tmp_path: Path) -> None:
    first, second = {**SLURM, **SECRET, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}, {**SLURM, **SECRET}
    assert as_node(tmp_path, True, second) == Started(1, "n01", 10112)
    assert as_node(tmp_path, True, first) == Started(0, "n01", 10112)
    assert first["SHOAL_SECRET"] == second["SHOAL_SECRET"] != SECRET["SHOAL_SECRET"]
    assert "SLURM_PROCID" not in second  # the ranks of a node are none of Slurm's
    pod = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "train-0.train", **SECRET}
    assert as_node(tmp_path, True, pod).address == "train-0.train:29500" and "WORLD_SIZE" not in pod
    assert as_node(tmp_path, True, {}) is None
    assert as_node(tmp_path, False, alone := {"JOB_COMPLETION_INDEX": "2"}) is None and alone == {}
    with pytest.raises(UserError, match=r"leads to no address.*Set MASTER_ADDR"):
        Started(0, "no-such-host.invalid", 1).own_host()
    assert Started(0, "::1", 5).address == "[::1]:5" and Started(0, "localhost", 5).own_host() in ("127.0.0.1", "::1")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "Slurm has started 2 processes on this host"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
            | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"},
            "torchrun has started this process as a rank",
        ),
        ({"SHOAL_RANK": "1", "SHOAL_SIZE": "2", "SHOAL_STORE": "tcp://h:1"}, "as a rank"),
    ],
)
def test_processes_that_are_no_nodes_are_refused(environ: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        as_node(tmp_path, True, {**environ, **SECRET})


STEPS = 2000
TRAIN = [*SHOAL, "train", "nodes.toml"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(place: Path, run) -> list[float]:
    """The losses of the same job on two ranks that the local launcher starts."""
    (place / "nodes.toml").write_text(JOB.format(steps=STEPS, every=50))
    run(*TRAIN, "--nproc", "2", "--set", "run.dir=undisturbed")
    return losses_of(place / "undisturbed")


def losses_of(run_dir: Path) -> list[float]:
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [each.step for each in records.steps] == list(range(1, STEPS + 1))
    return [each.loss for each in records.steps]


def script(place: Path, name: str) -> Path:
    path = place / f"{name}.sh"
    path.write_text(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --no-kill --open-mode=append\n"
        f"srun --no-kill --kill-on-bad-exit=0 {' '.join(TRAIN)} --nodes 1:2 --nproc 1 --set run.dir={name}\n"
    )
    return path


def submit(slurm: Slurm, place: Path, name: str) -> str:
    return slurm.submit(
        script(place, name), f"--chdir={place}", f"--output={name}.out", "--export=ALL,OMP_NUM_THREADS=1"
    )


def wait_for_world(run_dir: Path, world: int, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    path = run_dir / "metrics.jsonl"
    while not path.exists() or [each.world for each in read_metrics(path).memberships][-1:] != [world]:
        assert time.monotonic() < deadline, f"no world of {world}"
        time.sleep(0.05)


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["requeued", "preempted"])
def test_a_job_whose_tasks_are_nodes_begins_again_where_it_was(how: str, slurm: Slurm, place: Path, undisturbed):
    name = f"nodes-{how}"
    job = submit(slurm, place, name)
    wait_for_world(place / name, 2)
    wait_for_step(place / name, 70)
    if how == "requeued":
        slurm.ask("scontrol", "requeue", job)
    else:
        (place / "urgent.sh").write_text("#!/bin/sh\n")
        urgent = slurm.submit(place / "urgent.sh", "--partition=urgent", "--nodes=2", "--output=/dev/null")
        slurm.wait(urgent, "COMPLETED")
    slurm.wait(job, "COMPLETED", 200)
    said = (place / f"{name}.out").read_text()
    assert said.count("shoal: generation 1: 2 rank(s) on 2 node(s)") == 2 and "generation 2" not in said, said
    assert "stopped by SIGTERM" in (place / name / "metrics.jsonl").read_text(), said
    assert [said.count(f"task {each}: Exited with exit code 143") for each in (0, 1)] == [1, 1], said
    assert losses_of(place / name) == undisturbed


@pytest.mark.matrix
def test_a_task_that_is_lost_is_a_lost_node(slurm: Slurm, place: Path, undisturbed) -> None:
    job = submit(slurm, place, "nodes-lost")
    wait_for_world(place / "nodes-lost", 2)
    wait_for_step(place / "nodes-lost", 70)
    tasks = [each for each in psutil.process_iter(["cmdline", "environ"]) if is_task(each, job)]
    second = next(each for each in tasks if each.info["environ"]["SLURM_PROCID"] == "1")
    os.kill(second.pid, signal.SIGKILL)
    wait_for_world(place / "nodes-lost", 1)
    wait_for_step(place / "nodes-lost", STEPS)
    assert losses_of(place / "nodes-lost") == pytest.approx(undisturbed, rel=1e-5)


def is_task(process: psutil.Process, job: str) -> bool:
    line, environ = process.info["cmdline"] or [], process.info["environ"] or {}
    return (
        "--nodes" in line and environ.get("SLURM_JOB_ID") == job and "SLURM_STEP_ID" in environ and line[1:2] == ["-m"]
    )

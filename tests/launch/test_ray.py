"""A real Ray cluster of several nodes on this host: ranks are actors; a lost one ends the run, or starts it again."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import UserError
from shoal.launch import ray as launch_ray
from shoal.launch.environment import discover
from shoal.launch.identity import Identity
from shoal.launch.ray import Place, variables_of
from shoal.report.metrics import read_metrics
from tests.launch.conftest import ended, free_port, losses
from tests.launch.packages import modules, wheel

PROGRAM = """
import os, sys
with open("pid" + os.environ["RANK"], "w") as file:
    file.write(str(os.getpid()))
from shoal.jobs.__main__ import run
run(sys.argv[1], sys.argv[2:])
"""
"""`-m shoal.jobs` that leaves the process id of each rank."""
DRIVER = """
import os, signal, threading, time
import psutil, ray
from ray.cluster_utils import Cluster
from shoal.launch.ray import run
from shoal.report.metrics import read_metrics

def when_at(step, act):
    def watch():
        path = "{run_dir}/metrics.jsonl"
        while not os.path.exists(path) or len(read_metrics(path).steps) < step:
            time.sleep(0.05)
        act()
    threading.Thread(target=watch, daemon=True).start()

cluster = Cluster()
for _ in range({nodes}):  # beside other clusters of this host
    cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20, dashboard_port={port}, temp_dir="{temporary}")
ray.init(address=cluster.address, log_to_driver=True)
job = ["program.py", "job.toml", "run.dir={run_dir}"]
{then}
ray.shutdown()
cluster.shutdown()
print("exit code", code, flush=True)
"""


def ray_folder() -> str:
    """A folder for clusters, with the one in which Ray leaves the address of the last: it makes that in /tmp alone."""
    folder = tempfile.mkdtemp(prefix="ray-")  # the names of sockets in it may have about a hundred characters
    os.mkdir(f"{folder}/ray")
    return folder


@pytest.fixture
def drive(place: Path, start) -> Callable[..., str]:
    """Runs a driver with a cluster of nodes of two CPUs each; returns its output."""
    (place / "program.py").write_text(PROGRAM)
    path = f"{modules(wheel('ray'))}:{os.environ.get('PYTHONPATH', '')}"

    def call(run_dir: str, then: str, nodes: int = 2) -> str:
        temporary = ray_folder()
        program = DRIVER.format(run_dir=run_dir, then=then, nodes=nodes, port=free_port(), temporary=temporary)
        quiet = {
            "RAY_TMPDIR": temporary,
            "RAY_DEDUP_LOGS": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }
        try:
            return ended(start(sys.executable, "-c", program, PYTHONPATH=path, RAY_TMPDIR=temporary, **quiet))
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    return call


@pytest.mark.matrix
def test_actors_on_two_nodes_train(drive, place: Path, expected) -> None:
    said = drive("ray", "code = run(job, 3)")
    assert "exit code 0" in said, said
    assert losses(place / "ray") == expected


@pytest.mark.matrix
def test_a_lost_actor_ends_the_run_and_is_named(drive) -> None:
    said = drive(
        "lost",
        "when_at(5, lambda: os.kill(int(open('pid1').read()), signal.SIGKILL))\n"
        "code = run([*job, 'train.steps=100000'], 3)\n",
    )
    assert "exit code 4" in said, said
    report = said[said.index("error: rank 1 on host") :]
    assert "its actor is lost, on node" in report and "with restarts it does so by itself" in report
    assert "rank 0: lost its peer" in report and "rank 2: lost its peer" in report


@pytest.mark.matrix
def test_after_a_lost_node_the_run_goes_on_by_itself_on_another(drive, place: Path, uninterrupted) -> None:
    """Of three nodes one that has ranks dies after some steps: its raylet, and all that it started."""
    said = drive(
        "moved",
        "def lose():\n"
        "    raylets = [psutil.Process(int(open(f'pid{rank}').read())).parent() for rank in range(3)]\n"
        "    head = cluster.head_node.all_processes['raylet'][0].process.pid\n"
        "    lost = next(each for each in raylets if each.pid != head)\n"
        "    for each in [lost, *lost.children(recursive=True)]:\n"
        "        each.kill()\n"
        "when_at(30, lose)\n"
        "code = run([*job, 'train.steps=600', 'run.save_every=10'], 3, restarts=1)\n",
        nodes=3,
    )
    assert "exit code 0" in said and "the ranks start again (1 of 1)" in said, said
    records = read_metrics(place / "moved/metrics.jsonl")
    assert records.attempts == 2 and len(records.resumed) == 1
    assert [each.loss for each in records.steps] == uninterrupted


@pytest.mark.matrix
def test_too_few_resources_and_a_wrong_job_are_refused(drive) -> None:
    said = drive(
        "none",
        "from shoal.errors import UserError\n"
        "code = run([*job, 'train.stepz=3'], 2)\n"
        "try:\n"
        "    run(job, 5, patience=2)\n"
        "except UserError as error:\n"
        "    print(error)\n",
    )
    assert "exit code 2" in said and 'unknown key "train.stepz"' in said
    assert "Ray has no room for 5 ranks with {'CPU': 1} each within 2 s" in said and "'CPU': 4.0" in said


PLACES = [Place("n1", "10.0.0.1", 4001), Place("n1", "10.0.0.1", 4002), Place("n2", "10.0.0.2", 4003)]


@pytest.mark.fast
def test_actors_know_their_places() -> None:
    found = [discover(variables) for variables in variables_of(PLACES)]
    address = "tcp://10.0.0.1:4001"
    assert found == [
        Identity(0, 3, 0, 2, address, 0, "Ray", rank0_serves=True),
        Identity(1, 3, 1, 2, address, 0, "Ray", rank0_serves=True),
        Identity(2, 3, 0, 1, address, 0, "Ray", rank0_serves=True),
    ]
    assert {each["MASTER_ADDR"] for each in variables_of(PLACES[:2])} == {"127.0.0.1"}  # a store for this node alone


@pytest.mark.fast
def test_without_the_package_the_remedy_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'shoal\[ray\]'"):
        launch_ray.run(["script.py"], 2)

"""Nodes as actors of a real Ray of several nodes on this host: actors and Ray nodes are lost and come."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal.report.metrics import read_metrics
from tests.elastic.test_launched import wait_for_world
from tests.elastic.test_nodes import JOB
from tests.launch.conftest import SHOAL, free_port
from tests.launch.conftest import place as place
from tests.launch.conftest import run as run
from tests.launch.conftest import start as start  # which `run` needs
from tests.launch.packages import modules, wheel
from tests.launch.test_ray import ray_folder
from tests.launch.test_slurm import wait_for_step

pytestmark = pytest.mark.matrix
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster, nodes = Cluster(), []
common = {{"object_store_memory": 80 * 2**20, "temp_dir": "{temporary}", "include_dashboard": False}}
soon = {{"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}}
cluster.add_node(num_cpus=0, dashboard_port={port}, _system_config=soon, **common)  # beside other clusters of this host
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "add\\n":
        nodes.append(cluster.add_node(num_cpus=2, **common))  # room for two nodes of a job, which has one there
    else:
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    print(len(nodes), flush=True)
cluster.shutdown()
"""
"""A cluster whose nodes have two CPUs each, but the first, which has none: the driver is there."""


class Cluster:
    """A cluster in a process of its own. `address`: what a driver's RAY_ADDRESS is."""

    def __init__(self, place: Path, temporary: str, nodes: int) -> None:
        path = f"{modules(wheel('ray'))}:{os.environ.get('PYTHONPATH', '')}"
        own = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        own |= {"RAY_TMPDIR": temporary, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._environ = {**os.environ, **own, "XDG_CACHE_HOME": str(place / "cache"), "OMP_NUM_THREADS": "1"}
        self._place = place
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER.format(temporary=temporary, port=free_port())],
            cwd=place,
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.address = self._answer()
        for _ in range(nodes):
            self.add()

    def train(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Starts a driver, whose output is in `name`.out."""
        command = [*SHOAL, "train", "nodes.toml", "--set", f"run.dir={name}", *options]
        environ = {**self._environ, "RAY_ADDRESS": self.address}
        with open(self._place / f"{name}.out", "wb") as output:
            return subprocess.Popen(command, cwd=self._place, env=environ, stdout=output, stderr=output)

    def add(self) -> None:
        """A Ray node comes."""
        self._ask("add")

    def remove(self) -> None:
        """The Ray node that came last is gone, with all that it started."""
        self._ask("remove")

    def close(self) -> None:
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.communicate(timeout=60)
        for each in psutil.wait_procs(family, timeout=10)[1]:
            each.kill()

    def _ask(self, what: str) -> None:
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if line[0].isdigit() and " " not in line:
                return line.strip()
        raise AssertionError(f"Ray did not come up: {''.join(said)}")


@pytest.fixture
def cluster(place: Path) -> Iterator[Callable[[int], Cluster]]:
    running: list[Cluster] = []
    temporary = ray_folder()

    def begin(nodes: int) -> Cluster:
        running.append(Cluster(place, temporary, nodes))
        return running[-1]

    try:
        yield begin
    finally:
        for each in running:
            each.close()
        shutil.rmtree(temporary, ignore_errors=True)


def supervisors(place: Path) -> list[psutil.Process]:
    """The processes of the nodes of jobs there, the one that began first at first."""
    running = psutil.process_iter(["cmdline", "create_time", "cwd"])
    found = [each for each in running if each.info["cwd"] == str(place) and "shoal.cli.on_ray" in each.info["cmdline"]]
    return sorted(found, key=lambda each: each.info["create_time"])


def test_actors_and_ray_nodes_are_lost_and_come(cluster, place: Path, run) -> None:
    steps = 100_000
    (place / "nodes.toml").write_text(JOB.format(steps=steps, every=200))
    ray = cluster(2)
    driver = ray.train("ray", "--nodes", "1:2")
    try:
        wait_for_world(place / "ray", 2)
        actors = [each.parent() for each in supervisors(place)]
        assert len({each.ppid() for each in actors if each is not None}) == 2  # of two Ray nodes
        joined, actor = supervisors(place)[1], actors[1]
        assert actor is not None and "ray" in actor.name()
        actor.kill()
        psutil.wait_procs([joined], timeout=5)
        assert not joined.is_running()  # what the actor had started ended with it
        wait_for_world(place / "ray", 1)
        wait_for_world(place / "ray", 2)  # it has started again
        ray.remove()
        wait_for_world(place / "ray", 1)
        ray.add()
        wait_for_world(place / "ray", 2)
        step = len(read_metrics(place / "ray/metrics.jsonl").steps)
        wait_for_step(place / "ray", step + 20)
        driver.send_signal(signal.SIGTERM)
        driver.wait(60)
    finally:
        driver.kill()
    said = (place / "ray.out").read_text()
    assert driver.returncode == 128 + signal.SIGTERM, said
    records = read_metrics(place / "ray/metrics.jsonl")
    assert [each.world for each in records.memberships][-5:] == [2, 1, 2, 1, 2], said
    assert sum(each.lost for each in records.memberships) == 0, said
    assert records.end is not None and records.end.reason == "stopped by SIGTERM"
    assert "is lost: its actor is lost" in said and not supervisors(place)
    done = [each.step for each in records.steps]
    assert done == list(range(1, len(done) + 1))
    run(*SHOAL, "train", "nodes.toml", "--nproc", "2", "--set", "run.dir=alone", "--set", f"train.steps={len(done)}")
    alone = [each.loss for each in read_metrics(place / "alone/metrics.jsonl").steps]
    assert [each.loss for each in records.steps] == pytest.approx(alone, rel=1e-5)


def test_a_job_that_loses_all_nodes_goes_on_from_its_checkpoint(cluster, place: Path) -> None:
    (place / "nodes.toml").write_text(JOB.format(steps=1200, every=100))
    ray = cluster(1)
    driver = ray.train("all", "--nodes", "1", "--resume", "never")
    try:
        wait_for_step(place / "all", 150)
        supervisors(place)[0].kill()
        driver.wait(120)
    finally:
        driver.kill()
    said = (place / "all.out").read_text()
    assert driver.returncode == 0, said
    assert "its supervisor was killed by signal 9" in said
    records = read_metrics(place / "all/metrics.jsonl")
    assert [each.step for each in records.steps] == list(range(1, 1201)) and records.attempts == 2

"""Nodes with addresses of their own, in network namespaces: a cut link, a host that vanishes, one that comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import Cluster, _run, _run_all, address, obstacle, set_up, tear_down
from shoal.elastic import nodes
from tests.elastic.test_nodes import Cli, records, steps_done, undisturbed, until, worlds, write_job

pytestmark = [pytest.mark.matrix, pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "")]


class Network:
    """Three hosts behind a switch."""

    def __init__(self) -> None:
        self.made = Cluster(os.getpid(), 3)

    def cut(self, host: int) -> None:
        """Lets nothing to or from a host, which does not notice."""
        _run(["ip", "-n", self.made.switch, "link", "set", f"port{host}", "nomaster"])

    def mend(self, host: int) -> None:
        _run(["ip", "-n", self.made.switch, "link", "set", f"port{host}", "master", "bridge"])

    def on(self, host: int) -> tuple[str, ...]:
        """What a command begins with to run on a host."""
        return "ip", "netns", "exec", self.made.namespace(host)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    try:
        _run_all(set_up(network.made, "1gbit"))
        yield network
    except RuntimeError as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        for command in tear_down(network.made.namespaces):
            subprocess.run(command, capture_output=True)


class Host:
    """A node of tests/elastic/pretend.py on a host."""

    def __init__(self, network: Network, host: int, folder: Path, *how: str) -> None:
        self.out = folder / f"host{host}-{time.time_ns()}"
        command = [*network.on(host), sys.executable, "-m", "tests.elastic.pretend", *how]
        with self.out.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines() if line.startswith("{")]

    @property
    def port(self) -> str:
        until(lambda: any("port" in line for line in self.lines) or self.process.poll() is not None, 60)
        return str(next(line["port"] for line in self.lines if "port" in line))

    @property
    def runs(self) -> tuple[int, int]:
        """The generation that runs here, and the number of its nodes."""
        last = next((line for line in reversed(self.lines) if "runs" in line), {"runs": 0})
        return last["runs"], last.get("nodes", 0)


@pytest.fixture
def three(network: Network, tmp_path: Path) -> Iterator[tuple[Network, list[Host]]]:
    hosts = [Host(network, 0, tmp_path, "lead", address(1))]
    try:
        port = hosts[0].port
        hosts += [Host(network, each, tmp_path, "join", address(1), port, address(each + 1)) for each in (1, 2)]
        until(lambda: all(host.runs[1] == 3 for host in hosts), 60)
        yield network, hosts
    finally:
        for host in hosts:
            host.process.kill()
            host.process.wait()


def one_generation(*hosts: Host) -> Callable[[], bool]:
    def check() -> bool:
        runs = {host.runs for host in hosts}
        return len(runs) == 1 and runs.pop()[1] == len(hosts)

    return check


def overlaps(hosts: list[Host]) -> list[tuple[int, int]]:
    """Pairs of generations that ran at the same time, by what the hosts printed."""
    spans = []
    for host in hosts:
        began = None
        for line in [*(line for line in host.lines if "runs" in line), {"runs": 0, "time": time.time()}]:
            if began is not None:
                spans.append((began["runs"], began["time"], line["time"]))
            began = line if line["runs"] else None
    return [(a, b) for a, start, end in spans for b, other, until_ in spans if a < b and other < end and start < until_]


def test_a_host_that_vanishes_is_noticed_within_two_seconds_and_may_come_back(three, tmp_path: Path):
    network, hosts = three
    network.cut(2)
    began = time.monotonic()
    until(one_generation(*hosts[:2]), 10)
    assert time.monotonic() - began < 2.5  # 1.25 s of silence, and two looks of this test
    until(lambda: hosts[2].runs == (0, 0), 5)  # it has ended its ranks by itself
    network.mend(2)
    until(one_generation(*hosts), 30)
    hosts[2].process.kill()
    until(one_generation(*hosts[:2]), 10)
    hosts[2] = Host(network, 2, tmp_path, "join", address(2), hosts[1].port, address(3))
    until(one_generation(*hosts), 60)
    assert overlaps(hosts) == []


def test_a_coordinator_behind_a_cut_link_stops_and_the_larger_side_goes_on(three):
    network, hosts = three
    network.cut(0)
    began = time.monotonic()
    until(one_generation(*hosts[1:]), 20)
    print(f"the larger side goes on after {time.monotonic() - began:.1f} s")
    assert hosts[0].runs == (0, 0)
    network.mend(0)
    until(one_generation(*hosts), 30)  # it follows now
    assert overlaps(hosts) == []


def test_of_two_nodes_with_a_cut_link_between_them_the_coordinator_s_goes_on(three):
    network, hosts = three
    hosts[2].process.kill()
    until(one_generation(*hosts[:2]), 10)
    network.cut(1)
    until(one_generation(hosts[0]), 10)
    time.sleep(6)
    assert hosts[1].runs == (0, 0)
    network.mend(1)
    until(one_generation(*hosts[:2]), 30)
    assert overlaps(hosts[:2]) == []


def test_a_coordinator_that_is_killed_is_replaced_within_three_seconds(three):
    _, hosts = three
    hosts[0].process.kill()
    began = time.monotonic()
    until(one_generation(*hosts[1:]), 20)
    print(f"the standby goes on after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 3.0


def test_training_on_two_hosts_goes_on_when_one_vanishes_with_the_losses_of_an_undisturbed_run(
    network: Network, tmp_path: Path
):
    steps = 1500
    write_job(tmp_path, steps, 100)
    first = Cli(tmp_path, "job.toml", "--nodes", "1:2", "--host", "eth0", prefix=network.on(0))
    second = None
    try:
        port = first.wait_for(rf"--join {address(1)}:(\d+)")[1]
        secret = tmp_path / "runs/job" / nodes.SECRET
        second = Cli(tmp_path, "--join", f"{address(1)}:{port}", "-n", "1", prefix=network.on(1), secret=secret)
        first.wait_for(r"2 rank\(s\) on 2 node\(s\)")
        until(lambda: worlds(tmp_path)[-1:] == [2])
        until(lambda: steps_done(tmp_path) > records(tmp_path).memberships[-1].step + 150)
        network.cut(1)
        first.wait_for("was silent for")
        assert first.process.wait(200) == 0, first.said
    finally:
        for node in filter(None, (first, second)):
            node.process.kill()
            node.process.wait()
    found = records(tmp_path)
    assert [each.step for each in found.steps] == list(range(1, steps + 1))
    assert [each.loss for each in found.steps] == pytest.approx(undisturbed(tmp_path, steps), rel=1e-5)
    assert found.memberships[-1].world == 1 and found.memberships[-1].lost == 0

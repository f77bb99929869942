"""The cluster's commands as data, and where it is possible the cluster itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import namespaces
from benchmarks.namespaces import Cluster, leftovers, obstacle, set_up, tear_down

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
MADE = Cluster(owner=7, ranks=2)

HOLDS_A_CLUSTER = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background begins with it ignored
from benchmarks.namespaces import cluster
with cluster(2, "100mbit"):
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def names() -> str:
    return subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=True).stdout


@pytest.mark.fast
def test_the_commands_of_two_ranks() -> None:
    assert [" ".join(command) for command in set_up(MADE, "100mbit")] == [
        "ip netns add shoal-links-7-switch",
        "ip -n shoal-links-7-switch link set lo up",
        "ip -n shoal-links-7-switch link add bridge type bridge",
        "ip -n shoal-links-7-switch addr add 10.77.0.254/24 dev bridge",
        "ip -n shoal-links-7-switch link set bridge up",
        "ip netns add shoal-links-7-rank0",
        "ip -n shoal-links-7-rank0 link set lo up",
        "ip -n shoal-links-7-rank0 link add eth0 type veth peer name port0 netns shoal-links-7-switch",
        "ip -n shoal-links-7-switch link set port0 master bridge up",
        "ip -n shoal-links-7-rank0 addr add 10.77.0.1/24 dev eth0",
        "ip -n shoal-links-7-rank0 link set eth0 up",
        "tc -n shoal-links-7-rank0 qdisc add dev eth0 root tbf rate 100mbit burst 128kb latency 20ms",
        "ip netns add shoal-links-7-rank1",
        "ip -n shoal-links-7-rank1 link set lo up",
        "ip -n shoal-links-7-rank1 link add eth0 type veth peer name port1 netns shoal-links-7-switch",
        "ip -n shoal-links-7-switch link set port1 master bridge up",
        "ip -n shoal-links-7-rank1 addr add 10.77.0.2/24 dev eth0",
        "ip -n shoal-links-7-rank1 link set eth0 up",
        "tc -n shoal-links-7-rank1 qdisc add dev eth0 root tbf rate 100mbit burst 128kb latency 20ms",
    ]


@pytest.mark.fast
def test_what_is_made_is_removed() -> None:
    added = [command[-1] for command in set_up(MADE, "1gbit") if command[:3] == ["ip", "netns", "add"]]
    assert [command[-1] for command in tear_down(MADE.namespaces)] == added


@pytest.mark.fast
def test_only_namespaces_of_dead_benchmarks_are_left_over() -> None:
    listing = "shoal-links-7-rank1 (id: 3)\nshoal-links-7-switch\nshoal-links-8-switch (id: 0)\nsomebody-elses\n"
    assert leftovers(listing, alive={8, 1}) == ["shoal-links-7-rank1", "shoal-links-7-switch"]
    assert leftovers("", alive=set()) == []


@pytest.mark.fast
def test_the_obstacle_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    assert "tc of iproute2 not found" in obstacle() and "apt-get install iproute2" in obstacle()
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "run as root" in obstacle()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux" in obstacle()


@pytest.mark.fast
def test_a_command_that_fails_says_which(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ls /no/such/place: ls: "):
        namespaces._run(["ls", "/no/such/place"])


@pytest.mark.skipif(bool(obstacle()), reason="network namespaces need Linux, root and iproute2")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.matrix), signal.SIGTERM, signal.SIGKILL]
)
def test_the_cluster_goes_with_its_benchmark(number: signal.Signals) -> None:
    """By Ctrl-C and SIGTERM it removes its namespaces itself; those of one that was killed are removed by the next."""
    child = subprocess.Popen((sys.executable, "-c", HOLDS_A_CLUSTER), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        if child.stdout.readline().strip() != str(child.pid):
            pytest.skip("the kernel refuses veth, bridge or tbf here")
        assert names().count(f"shoal-links-{child.pid}-") == 3
    finally:
        child.send_signal(number)
        child.wait()
    left = names()
    assert (f"shoal-links-{child.pid}-" in left) == (number == signal.SIGKILL)
    home = os.stat("/proc/thread-self/ns/net").st_ino
    with namespaces.cluster(1, "1gbit"):
        assert f"shoal-links-{child.pid}-" not in names()
        assert os.stat("/proc/thread-self/ns/net").st_ino != home
    assert os.stat("/proc/thread-self/ns/net").st_ino == home
    assert f"shoal-links-{os.getpid()}-" not in names()

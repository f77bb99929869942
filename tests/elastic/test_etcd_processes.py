"""Nodes as processes, and a real cluster of etcd: nodes that are killed or stand still, members of etcd that are lost,
passwords, TLS, and a training."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shoal.chaos.nodes import ranks_of
from shoal.elastic.etcd import Etcd, Unreachable, parse
from shoal.elastic.pulse import SILENCE
from shoal.errors import UserError
from tests.elastic.etcd import Pretended, Real
from tests.elastic.test_etcd import answers
from tests.elastic.test_namespaces import Host, one_generation, overlaps
from tests.elastic.test_nodes import cluster as cluster
from tests.elastic.test_nodes import records, steps_done, undisturbed, until, worlds, write_job

pytestmark = pytest.mark.matrix


class Node(Host):
    """A node of tests/elastic/pretend.py, which finds the others through etcd."""

    def __init__(self, url: str, name: str, folder: Path) -> None:
        self.name, self.out = name, folder / f"{name}-{time.time_ns()}"
        with self.out.open("wb") as file:
            command = [sys.executable, "-m", "tests.elastic.pretend", "etcd", url, name]
            self.process = subprocess.Popen(command, stdout=file, stderr=file)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Callable[..., Real]]:
    started: list[Real] = []

    def start(members: int = 1, **others) -> Real:
        started.append(Real(tmp_path, members, **others))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., list[Node]]]:
    started: list[Node] = []

    def start(url: str, *names: str) -> list[Node]:
        started.extend(Node(url, name, tmp_path) for name in names)
        return started[-len(names) :]

    yield start
    for node in started:
        node.process.send_signal(signal.SIGCONT)
        node.process.kill()
        node.process.wait()


def coordinator(url: str, hosts: list[Node]) -> Node:
    """The node that coordinates."""
    value, _ = asyncio.run(Etcd(parse(url)).get("/jobs/one/coordinator"))
    assert value is not None
    return next(host for host in hosts if f'"port": {host.port}'.encode() in value)


def test_a_coordinator_that_is_killed_and_one_that_stands_still_are_replaced_and_it_is_fenced(real, nodes) -> None:
    url = real().url
    asyncio.run(answers(url))
    hosts = nodes(url, "a", "b", "c", "d")
    until(one_generation(*hosts), 60)
    first = coordinator(url, hosts)
    first.process.kill()
    began = time.monotonic()
    left = [host for host in hosts if host is not first]
    until(one_generation(*left), 20)
    print(f"killed: the others go on after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 3.0
    second = coordinator(url, left)
    second.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    others = [host for host in left if host is not second]
    until(one_generation(*others), 30)
    print(f"stopped: the others go on after {time.monotonic() - began:.2f} s")
    third, number = coordinator(url, left), others[0].runs[0]
    assert third is not second and time.monotonic() - began > 2.0
    second.process.send_signal(signal.SIGCONT)
    until(lambda: one_generation(*left)() and left[0].runs[0] > number, 30)  # it follows now
    assert coordinator(url, left) is third
    assert overlaps(others) == []
    for host in left:
        numbers = [line["runs"] for line in host.lines if line.get("runs")]
        assert numbers == sorted(set(numbers))


def test_a_cluster_of_etcd_that_loses_a_member_disturbs_nobody(real, nodes) -> None:
    etcd = real(3)
    asyncio.run(answers(etcd.url))
    hosts = nodes(etcd.url, "a", "b", "c")
    until(one_generation(*hosts), 60)
    number = hosts[0].runs[0]
    etcd.lose_leader()
    time.sleep(8)  # twice the lease
    assert one_generation(*hosts)() and hosts[0].runs[0] == number
    hosts[2].process.kill()
    until(one_generation(*hosts[:2]), 20)
    etcd.lose_leader()  # one of three has no majority: nobody can be elected, nothing be decided
    until(lambda: all(host.runs == (0, 0) for host in hosts[:2]), 20)


def test_who_has_no_password_is_refused(real, nodes) -> None:
    url = real().url
    asyncio.run(answers(url))

    async def protect() -> None:
        etcd = Etcd(parse(url))
        for name, password in (("root", "top"), ("job", "right")):
            await etcd._ask("auth/user/add", {"name": name, "password": password})
        await etcd._ask("auth/user/grant", {"user": "root", "role": "root"})
        await etcd._ask("auth/role/add", {"name": "job"})
        own = {"permType": "READWRITE", "key": "L2pvYnMv", "range_end": "L2pvYnMw"}  # /jobs/ to /jobs0
        await etcd._ask("auth/role/grant", {"name": "job", "perm": own})
        await etcd._ask("auth/user/grant", {"user": "job", "role": "job"})
        await etcd._ask("auth/enable", {})
        for login, said in (
            ("", "refuses user ''"),
            ("job:wrong@", "refuses user 'job': .*invalid user ID or password"),
        ):
            with pytest.raises(UserError, match=said):
                await Etcd(parse(url.replace("//", f"//{login}"))).get("/jobs/one/coordinator")
        with pytest.raises(UserError, match="user 'job' may not read and write these keys"):
            await Etcd(parse(url.replace("//", "//job:right@"))).get("/other/coordinator")

    asyncio.run(protect())
    hosts = nodes(url.replace("//", "//job:right@"), "a", "b")
    until(one_generation(*hosts), 60)
    hosts[0].process.kill()
    until(one_generation(hosts[1]), 20)


def test_tls(real, tmp_path: Path, monkeypatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not here")
    files = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run(command, check=True, capture_output=True)
    url = real(tls=files).url
    with monkeypatch.context() as patch:
        patch.setenv("ETCDCTL_CACERT", str(files[0]))
        asyncio.run(answers(url))
        patch.setenv("ETCDCTL_CACERT", str(tmp_path / "none.pem"))
        with pytest.raises(UserError, match=r"ETCDCTL_CACERT, .* cannot be read"):
            Etcd(parse(url))
    with pytest.raises(UserError, match=r"no TLS with 127\.0\.0\.1"):  # an unknown authority
        asyncio.run(Etcd(parse(url)).get("x"))
    with pytest.raises((UserError, Unreachable), match=r"TLS.* etcds://"):
        asyncio.run(Etcd(parse(url.replace("etcds", "etcd"))).get("x"))


def test_a_training_goes_on_without_the_node_that_coordinated_it(real, cluster, tmp_path: Path) -> None:
    steps = 2000
    write_job(tmp_path, steps, 100)
    url = real().url
    asyncio.run(answers(url))
    same = ("job.toml", "--nodes", "1:3", "--coordinator", url)
    first = cluster(*same)
    first.wait_for("generation 1: 1 rank")
    second = cluster(*same)
    until(lambda: worlds(tmp_path)[-1:] == [2])
    third = cluster("--join", url, "--nproc", "1")
    until(lambda: worlds(tmp_path)[-1:] == [3])
    until(lambda: steps_done(tmp_path) > records(tmp_path).memberships[-1].step + 120)
    first.process.kill()
    until(lambda: worlds(tmp_path)[-1:] == [2])
    ended = [second.process.wait(200), third.process.wait(200)]
    assert ended == [0, 0], second.said + third.said
    found = records(tmp_path)
    assert [each.step for each in found.steps] == list(range(1, steps + 1))
    assert [each.loss for each in found.steps] == pytest.approx(undisturbed(tmp_path, steps), rel=1e-5)
    assert asyncio.run(Etcd(parse(url)).below("/jobs/one/")) == []


def test_ranks_end_without_their_supervisor_before_another_node_trains_in_their_place(real, cluster, tmp_path) -> None:
    steps = 4000
    write_job(tmp_path, steps, 50)
    url = real().url
    asyncio.run(answers(url))
    first = cluster("job.toml", "--nodes", "1:1", "--nproc", "1", "--coordinator", url)
    first.wait_for("generation 1: 1 rank")
    second = cluster("--join", url, "--nproc", "1")
    until(lambda: steps_done(tmp_path) > 60)
    until(lambda: ranks_of(second.process.pid) != [])  # it is a member, and has started its process
    ranks = ranks_of(first.process.pid)
    first.process.send_signal(signal.SIGSTOP)
    stopped = time.time()
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks), 10)
    assert time.time() - stopped < SILENCE + 1.5
    until(lambda: records(tmp_path).memberships[-1].generation == 2, 60)
    first.process.send_signal(signal.SIGCONT)
    assert [second.process.wait(200), first.process.wait(60)] == [0, 0], second.said + first.said
    found = records(tmp_path)
    assert [each.step for each in found.steps] == list(range(1, steps + 1))
    assert [each.loss for each in found.steps] == pytest.approx(undisturbed(tmp_path, steps), rel=1e-5)


def test_ctrl_c_at_the_last_node_is_recorded_as_such(cluster, tmp_path: Path) -> None:
    write_job(tmp_path, 100_000, 0)
    etcd = Pretended()
    try:
        node = cluster("job.toml", "--nodes", "1:2", "--coordinator", etcd.url)
        until(lambda: steps_done(tmp_path) > 20)
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(60) == 130, node.said
    finally:
        etcd.close()
    found = records(tmp_path)
    assert found.end is not None and found.end.reason == "stopped by SIGINT"
    assert found.checkpoints[-1].step == found.steps[-1].step

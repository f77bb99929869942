"""Where a job's nodes are on Ray and when they start again, with a pretended Ray and a clock of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli.on_ray import refuse_if_older, share
from shoal.cli.start import start_nodes
from shoal.elastic import ray_nodes
from shoal.elastic.ray_actor import Ended, Order, environment
from shoal.elastic.ray_nodes import Fleet, Wanted, forwarded
from shoal.errors import CheckpointError, LaunchError, UserError
from shoal.jobs.cluster.table import Cluster
from shoal.jobs.config import Job, Train
from shoal.launch.ray import names_cluster
from shoal.plan import Plan

pytestmark = pytest.mark.fast


class Lost(Exception):
    """Ray's error for an actor that is gone."""


@dataclass(eq=False)
class Group:
    count: int
    without: str
    nodes: dict[int, str] = field(default_factory=dict)

    @property
    def id(self) -> int:
        return id(self)


@dataclass(eq=False)
class Actor:
    """Tells what a test has it tell."""

    group: Group
    node: str
    members: list[str] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    tells: Any = None

    @property
    def begin(self) -> Any:
        return SimpleNamespace(remote=self._begin)

    @property
    def wait(self) -> Any:
        return SimpleNamespace(remote=lambda: self)

    @property
    def signal(self) -> Any:
        return SimpleNamespace(remote=self.signals.append)

    def _begin(self, order: Order) -> Actor:
        self.members = order.members
        return self


class Ray:
    """A cluster with room for so many bundles on each node."""

    exceptions = SimpleNamespace(RayError=Lost)

    def __init__(self) -> None:
        self.room: dict[str, int] = {}
        self.groups: list[Group] = []
        self.actors: list[Actor] = []  # those that live
        self.now = 1000.0
        self.util = SimpleNamespace(
            placement_group=self._group,
            placement_group_table=lambda group: {"bundles_to_node_id": group.nodes},
            remove_placement_group=self.groups.remove,
        )

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def nodes(self) -> list[dict[str, Any]]:
        self._place()
        return [{"NodeID": name, "Alive": True, "Resources": {"CPU": 1.0}} for name in self.room]

    def wait(self, futures: list[Actor], timeout: float) -> tuple[list[Actor], list[Actor]]:
        self.now += timeout
        return [each for each in futures if each.tells is not None], []

    def get(self, future: Actor) -> Any:
        told, future.tells = future.tells, None
        if isinstance(told, Lost):
            raise told
        return told

    def kill(self, actor: Actor) -> None:
        if actor in self.actors:
            self.actors.remove(actor)

    def start(self, kind: type, group: Group, index: int, resources: dict[str, float], threads: int) -> Actor:
        self.actors.append(Actor(group, group.nodes[index]))
        return self.actors[-1]

    def lose(self, node: str) -> None:
        """A Ray node is gone, with its actors."""
        del self.room[node]
        for actor in [each for each in self.actors if each.node == node]:
            actor.tells = Lost("the node died")
            self.actors.remove(actor)

    def _group(self, bundles: list[Any], strategy: str, bundle_label_selector: list[dict[str, str]] | None) -> Group:
        shunned = bundle_label_selector[0]["ray.io/node-id"] if bundle_label_selector else "!in()"
        assert strategy == "STRICT_SPREAD" and shunned.startswith("!in(")
        self.groups.append(Group(len(bundles), shunned.removeprefix("!in(").removesuffix(")")))
        return self.groups[-1]

    def _place(self) -> None:
        for group in self.groups:
            group.nodes = {index: node for index, node in group.nodes.items() if node in self.room}
            used = [node for each in self.groups for node in each.nodes.values()]
            free = [
                node
                for node, room in self.room.items()
                if room > used.count(node) and node not in group.without.split(",") and node not in group.nodes.values()
            ]
            missing = sorted(set(range(group.count)) - set(group.nodes))
            if len(free) >= len(missing):
                group.nodes |= dict(zip(missing, free, strict=False))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    pretended = Ray()
    monkeypatch.setattr(ray_nodes, "time", pretended)
    monkeypatch.setattr(ray_nodes, "ray_package", lambda: pretended)
    monkeypatch.setattr(ray_nodes, "start_actor", pretended.start)
    monkeypatch.setattr(ray_nodes, "machines", lambda: [{"CPU": 1.0}])
    yield pretended


@dataclass
class Driver:
    """A fleet whose time passes when a test says so."""

    ray: Ray
    fleet: Fleet
    received: list[int] = field(default_factory=list)

    def turn(self, seconds: float = 1.0) -> int | None:
        end = self.ray.now + seconds + 0.5
        while self.ray.now < end:
            self.fleet.heed(self.received)
            if (code := self.fleet.code(self.received)) is not None:
                return code
            self.fleet.look()
            self.fleet.hear()
        return None

    @property
    def nodes(self) -> list[str]:
        return [each.node for each in self.ray.actors]

    def come(self) -> None:
        """All that have begun become members."""
        for each in self.ray.actors:
            each.tells = each.tells or f"{each.node}:1"
        self.turn()


@pytest.fixture
def drive(ray: Ray) -> Any:
    def begin(least: int, most: int, **room: int) -> Driver:
        ray.room |= room
        return Driver(ray, Fleet(Wanted(["-m", "node"], least, most, 1, {"CPU": 1.0})))

    return begin


def test_the_first_node_founds_the_job_and_others_join_its_members(drive, ray: Ray) -> None:
    driver = drive(2, 3, a=1)
    driver.turn(5)
    assert driver.nodes == []  # the least number is placed as a whole
    ray.room["b"] = 1
    driver.turn()
    assert driver.nodes == ["a"] and ray.actors[0].members == []
    driver.come()
    assert driver.nodes == ["a", "b"] and ray.actors[1].members == ["a:1"]
    assert [each.without for each in ray.groups] == ["", "a,b"]
    driver.come()
    ray.room["c"] = 1
    driver.turn()
    assert driver.nodes == ["a", "b", "c"] and ray.actors[2].members == ["a:1", "b:1"]
    driver.come()
    ray.room["d"] = 1
    driver.turn(5)
    assert driver.nodes == ["a", "b", "c"] and len(ray.groups) == 2


def test_a_lost_actor_starts_again_at_once_and_then_later_and_later(drive, ray: Ray) -> None:
    driver = drive(1, 2, a=1, b=1)
    for _ in range(3):
        driver.turn()
        driver.come()
    assert driver.nodes == ["a", "b"]
    waited = []
    for _ in range(3):
        ray.actors[-1].tells = Lost("killed")
        ray.actors.pop()
        began = ray.now
        while driver.nodes != ["a", "b"]:
            assert driver.turn(0.1) is None
        waited.append(ray.now - began)
        assert ray.actors[-1].members == ["a:1"]
        driver.come()
    assert waited[0] < 3 and 4 <= waited[1] < 7 and 8 <= waited[2] < 11


def test_a_lost_ray_node_is_replaced_by_one_that_comes(drive, ray: Ray) -> None:
    driver = drive(2, 3, a=1, b=1, c=1)
    for _ in range(4):
        driver.turn()
        driver.come()
    assert driver.nodes == ["a", "b", "c"]
    ray.lose("a")
    driver.turn(3)
    assert driver.nodes == ["b", "c"]
    ray.room["d"] = 1
    driver.turn(2)
    assert driver.nodes == ["b", "c", "d"] and ray.actors[-1].members == ["b:1", "c:1"]  # it founds nothing


def test_no_ray_node_has_two_nodes(drive, ray: Ray) -> None:
    driver = drive(2, 3, a=1, b=1, c=2)
    for _ in range(4):
        driver.turn()
        driver.come()
    ray.lose("b")
    driver.turn(3)
    assert sorted(driver.nodes) == ["a", "c"] and len([each for each in ray.groups if each.count == 1]) == 2
    ray.room["d"] = 1
    driver.turn(2)
    assert sorted(driver.nodes) == ["a", "c", "d"]


@pytest.mark.parametrize("code", [128 + signal.SIGTERM, CheckpointError.exit_code])
def test_a_node_that_was_told_to_leave_is_left_alone(drive, ray: Ray, code: int) -> None:
    """Also one whose last checkpoint failed: the others go on in memory."""
    driver = drive(1, 2, a=1, b=1)
    for _ in range(3):
        driver.turn()
        driver.come()
    ray.actors[1].tells = Ended(code, True)
    driver.turn(20)
    assert driver.nodes == ["a"]
    assert ray.groups[-1].without == "a,b"
    ray.room["c"] = 1
    driver.turn(2)
    assert driver.nodes == ["a", "c"]


def started(drive: Any, **room: int) -> Driver:
    driver = drive(1, len(room), **room)
    for _ in range(len(room) + 1):
        driver.turn()
        driver.come()
    assert driver.nodes == sorted(room)
    return driver


def test_the_job_ends_as_its_supervisors_say(drive, ray: Ray) -> None:
    driver = started(drive, a=1, b=1)
    ray.actors[0].tells = Ended(0, True)
    assert driver.turn() is None  # the other one is waited for
    ray.actors[0].tells = Ended(0, True)
    assert driver.turn() == 0
    driver.fleet.close()
    assert not ray.groups and not ray.actors


def test_a_job_whose_last_checkpoint_failed_ends_with_that(drive, ray: Ray) -> None:
    driver = started(drive, a=1, b=1)
    for each in ray.actors:
        each.tells = Ended(CheckpointError.exit_code, True)
    assert driver.turn() == CheckpointError.exit_code


def test_a_supervisor_that_ends_no_more_is_not_waited_for_for_ever(drive, ray: Ray) -> None:
    driver = started(drive, a=1, b=1)
    ray.actors[0].tells = Ended(3, True)
    assert driver.turn(ray_nodes.GRACE + 2) == 3


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (Ended(UserError.exit_code, False), 2),
        (Ended(LaunchError.exit_code, False), None),
        (Ended(-9, False), None),
        (Lost("killed"), None),
    ],
)
def test_the_only_node_is_started_again_unless_the_error_is_the_users(drive, ray: Ray, ended: Any, code: int | None):
    driver = started(drive, a=1)
    ray.actors[0].tells = ended
    assert driver.turn(2) == code
    if code is None:
        assert driver.nodes == ["a"] and ray.actors[0].members == []


def test_a_job_whose_nodes_are_lost_at_once_again_and_again_ends(drive, ray: Ray) -> None:
    driver = drive(1, 1, a=1)
    codes = []
    for _ in range(40):
        for actor in ray.actors:
            actor.tells = actor.tells or Lost("killed")
        codes.append(driver.turn())
    assert codes[-1] == LaunchError.exit_code and not ray.actors


def test_one_that_joins_in_vain_does_not_end_the_job(drive, ray: Ray) -> None:
    driver = drive(2, 2, a=1, b=1)
    driver.turn()
    driver.come()  # b begins to join a, which is lost then
    ray.lose("a")
    ray.room["c"] = 1
    assert driver.turn(3) is None and driver.nodes == ["b"]
    ray.actors[0].tells = ""
    driver.turn()
    ray.actors[0].tells = Ended(UserError.exit_code, False)
    assert driver.turn(2) is None
    assert len(driver.nodes) == 1 and ray.actors[0].members == []  # one founds it again


def test_sigterm_has_the_job_end_and_a_second_sigint_ends_it_at_once(drive, ray: Ray) -> None:
    driver = started(drive, a=1, b=1)
    driver.received += [signal.SIGTERM, signal.SIGTERM]  # Ray sends it to the shell and to this process
    assert driver.turn(5) is None
    assert [each.signals for each in ray.actors] == [[signal.SIGINT], [signal.SIGINT]]
    for each in ray.actors:
        each.tells = Ended(128 + signal.SIGINT, True)
    assert driver.turn() == 128 + signal.SIGTERM
    driver.fleet.close()
    other = started(drive, a=1, b=1)
    other.received += [signal.SIGINT]
    assert other.turn(2) is None
    other.received += [signal.SIGINT]
    assert other.turn() == 128 + signal.SIGINT


def test_what_is_missing_is_said_once(drive, ray: Ray, capsys: pytest.CaptureFixture[str]) -> None:
    driver = drive(2, 2, a=1)
    driver.turn(100)
    (line,) = capsys.readouterr().err.splitlines()
    assert "Ray has no room yet for 2 node(s) with {'CPU': 1.0} each; its nodes have [{'CPU': 1.0}]" in line


def test_the_variables_of_a_node() -> None:
    driver = forwarded({"A": "1", "PATH": "/driver", "RAY_X": "1", "CUDA_VISIBLE_DEVICES": "3", "FILE": "f"})
    assert driver == {"A": "1", "PATH": "/driver", "FILE": "f"}
    order = Order([], [], 3, "/", driver, ("SLURM_PROCID", "FILE"))
    here = {"PATH": "/here", "SLURM_PROCID": "3", "OMP_NUM_THREADS": "8"}  # Ray itself may be a task of Slurm
    own = {"SHOAL_LAUNCHER": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    assert environment(order, here, 8.0) == {"A": "1", "PATH": "/here", "OMP_NUM_THREADS": "2", **own}
    assert environment(order, {"OMP_NUM_THREADS": "5"}, 8.0)["OMP_NUM_THREADS"] == "5"  # the user's own


@pytest.mark.parametrize(
    ("plan", "nproc", "cluster", "machines", "expected"),
    [
        (Plan(), None, Cluster(), [{"CPU": 1.0}, {"CPU": 8.0}], (2, {"CPU": 2.0})),
        (Plan(), None, Cluster(), [{"CPU": 64.0, "GPU": 8.0}], (8, {"CPU": 8.0, "GPU": 8.0})),
        (Plan(dp=4), None, Cluster(), [{"CPU": 64.0, "GPU": 8.0}], (4, {"CPU": 4.0, "GPU": 4.0})),
        (Plan(), 3, Cluster(cpus=16, memory="1GiB"), [{"GPU": 2.0}], (3, {"CPU": 16.0, "memory": 2.0**30})),
        (Plan(), None, Cluster(gpus=2), [], (2, {"CPU": 2.0, "GPU": 2.0})),
    ],
)
def test_the_share_of_a_node(plan: Plan, nproc: int | None, cluster: Cluster, machines: Any, expected: Any) -> None:
    job = Job({"name": "gpt"}, Train(steps=1), plan=plan, cluster=cluster)
    assert share(replace(job, run=replace(job.run, nproc=nproc)), machines) == expected


def test_when_nodes_are_on_ray(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_cluster({"RAY_ADDRESS": "10.0.0.1:6379"}) and names_cluster({"RAY_ADDRESS": "auto"})
    assert not names_cluster({}) and not names_cluster({"RAY_ADDRESS": "http://127.0.0.1:8265"})
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(UserError, match=r"--coordinator etcd://h/j: RAY_ADDRESS=auto is set.*or unset RAY_ADDRESS"):
        start_nodes(tmp_path / "job.toml", [], "1:2", None, "etcd://h/j")


def test_a_ray_that_does_not_heed_which_nodes_are_shunned_is_refused() -> None:
    for version in ("2.49.0", "2.60.0", "3.0.0.dev0"):
        refuse_if_older(version)
    with pytest.raises(UserError, match=r"Ray 2\.48\.1 is installed.*pip install 'ray>=2\.49'"):
        refuse_if_older("2.48.1")

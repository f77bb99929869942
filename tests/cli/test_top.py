"""`shoal top` on a terminal of its own, where a test writes the record that it reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shoal.jobs.lock import NAME, Holder
from shoal.report.metrics import EndRecord, MetricsLog
from tests.report.synthetic import run_record, step_record

PATIENCE = 20.0
needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Run:
    """A run directory that this process has, as a training process would."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        (directory / NAME).write_text(json.dumps(asdict(replace(Holder.here(), taken=time.time_ns()))))
        self.log = MetricsLog(directory / "metrics.jsonl")
        self.log.write(replace(run_record(), total=400, time=time.time()))

    def step(self, number: int) -> None:
        self.log.write(replace(step_record(number), time=time.time(), loss=400.0 - number))

    def end(self) -> None:
        self.log.write(EndRecord(reason="all 400 steps were trained", seconds=1.0))
        (self.directory / NAME).unlink()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


class Terminal:
    """A window of tmux, of which `command` is run in a shell."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-f", os.devnull, "-S", str(socket)]
        self("new-session", "-d", "-x", "80", "-y", "24", "env -u COLUMNS -u LINES PS1='$ ' sh")

    def __call__(self, *command: str) -> str:
        return subprocess.run([*self._tmux, *command], capture_output=True, text=True, check=True).stdout

    def type(self, line: str) -> None:
        self("send-keys", "-l", line)
        self("send-keys", "Enter")

    def wait_for(self, seen: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + PATIENCE
        while not seen(screen := self("capture-pane", "-p")):
            assert time.monotonic() < deadline, f"it shows:\n{screen}"
            time.sleep(0.05)
        return screen


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    window = Terminal(tmp_path / "tmux")
    yield window
    window("kill-server")


@needs_tmux
def test_a_view_grows_with_its_run_and_its_window_and_ends_with_either(terminal: Terminal, run: Run) -> None:
    command = f"{sys.executable} -m shoal.cli top {run.directory} --interval 0.1; echo left with $?"
    run.step(1)
    terminal.type(f"clear; {command}")
    screen = terminal.wait_for(lambda screen: "step   1/400" in screen and "$ " not in screen)  # a screen of its own
    assert "/run  trains" in screen
    run.step(2)
    terminal.wait_for(lambda screen: "step   2/400" in screen and "398.0000" in screen)
    with (run.directory / "metrics.jsonl").open("ab") as torn:  # as a killed process leaves it
        torn.write(b'{"kind": "step", "step": 3, "loss"')
    terminal("resize-window", "-x", "50", "-y", "12")
    screen = terminal.wait_for(lambda screen: "━" * 50 in screen and "━" * 51 not in screen)
    assert "step   2/400" in screen
    terminal("send-keys", "C-c")
    screen = terminal.wait_for(lambda screen: "left with 0" in screen)
    assert "Traceback" not in screen and "step   2/400" in screen  # its last frame stays
    terminal("resize-window", "-x", "120", "-y", "24")
    terminal.type(f"clear; {command.replace('left', 'gone')}")
    terminal.wait_for(lambda screen: "step   2/400" in screen and "$ " not in screen)
    run.log = MetricsLog(run.directory / "metrics.jsonl")
    run.step(400)
    run.end()
    screen = terminal.wait_for(lambda screen: "gone with 0" in screen)
    assert "/run  ended" in screen and "all 400 steps were trained" in screen and "step 400/400" in screen


@pytest.mark.fast
def test_one_frame_where_there_is_no_terminal(shoal, run: Run) -> None:
    run.step(7)
    answer = shoal("top", run.directory)
    assert answer.code == 0 and "trains" in answer.out and "step   7/400" in answer.out and "\x1b" not in answer.out
    assert str(os.getpid()) in answer.out
    run.end()
    assert "/run  ended\nall 400 steps were trained\n" in shoal("top", run.directory, "--once").out


@pytest.mark.fast
def test_a_directory_without_a_run(shoal, tmp_path: Path) -> None:
    for directory, message in (
        (tmp_path / "nowhere", "no such directory"),
        (tmp_path, "is not the directory of a run"),
    ):
        answer = shoal("top", directory)
        assert answer.code == 2 and message in answer.err and "Give the directory of a run" in answer.err
    (tmp_path / "metrics.jsonl").write_text("[1]\n")
    assert "metrics.jsonl has no record: " in shoal("top", tmp_path).err
    (tmp_path / NAME).write_text(json.dumps(asdict(Holder.here())))  # a run that has begun a moment ago
    assert "starting" in shoal("top", tmp_path).out


@pytest.mark.fast
def test_a_job_that_waits_for_its_hosts(shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"backend": "slurm", "number": "7", "name": "a", "run_dir": "", "time": 0, "about": {"log": "x"}}
    (tmp_path / "submitted.json").write_text(json.dumps(job))
    assert "empty" in shoal("top", tmp_path).out  # Slurm's commands are not here
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho '7|PENDING|Resources'")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert shoal("top", tmp_path).out.splitlines()[1] == "PENDING, Resources"
    squeue.write_text("#!/bin/sh\necho '7|CANCELLED|None'")  # before its ranks have begun
    where, state = shoal("top", tmp_path).out.splitlines()[:2]
    assert where.endswith("  stopped") and state == "CANCELLED"

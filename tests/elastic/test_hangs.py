"""A rank that hangs in an evaluation of a real job: the others go on without it, in memory."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.test_live import Run, run, same, undisturbed  # noqa: F401

HANGS = """
import signal, sys, time

def hang(number, frame):
    while frame is not None:
        if frame.f_code.co_name == "evaluate":
            time.sleep(1e6)
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, 0.002)

signal.signal(signal.SIGUSR1, hang)
signal.signal(signal.SIGALRM, hang)
"""
"""After SIGUSR1 a process's main thread stands still as soon as it evaluates; its other threads go on."""


@pytest.mark.matrix
def test_a_rank_that_hangs_in_an_evaluation_is_killed_and_the_others_go_on(
    tmp_path: Path,
    run: Run,  # noqa: F811
    undisturbed: Callable[[int], list[float]],  # noqa: F811
    monkeypatch,
):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"), prepend=":")
    run.start("run.eval_every=5")
    run.trains(60, world=4)
    before = run.ranks()
    before[2].send_signal(signal.SIGUSR1)
    run.nodes[0].wait_for("rank 2 came no further in an evaluation for 1")
    run.trains(20, world=4)
    assert len(set(run.ranks()) & set(before)) == 3
    run.ends()
    same(run, undisturbed)

"""A rank of a real job that hangs in an evaluation, a sample, a save, or in the first step after a resize: the others
go on without it, in memory."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.test_live import Run, run, same, undisturbed  # noqa: F401

HANGS = """
import os, signal, sys, time

places = os.environ["HANGS_IN"].split(",")

def hang(number, frame):
    last = len(places) == 1
    while frame is not None and not (last and "/shoal/comm/" in frame.f_code.co_filename):
        if frame.f_code.co_name == places[0]:
            if last:
                time.sleep(1e6)
            del places[0]
            break
        frame = frame.f_back
    signal.setitimer(signal.ITIMER_REAL, 0.002)

def hang_in_a_collective(number, frame):
    from shoal.comm.stalls import Calls

    def end(calls, before=Calls.end):
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == places[1]:
                time.sleep(1e6)
            frame = frame.f_back
        before(calls)

    Calls.end = end

signal.signal(signal.SIGUSR1, hang_in_a_collective if places[0] == "collective" else hang)
signal.signal(signal.SIGALRM, hang)
"""
"""After SIGUSR1 a process's main thread stands still once it has been in functions of these names, one after the other,
and in the last one in no collective, where it would count as one that waits; its other threads go on. After
"collective" it stands still in the first collective that the function calls, out of which the others come."""


@pytest.mark.matrix
@pytest.mark.parametrize(
    "places, sets, killed, said",
    [
        ("evaluate", ["run.eval_every=5"], 0, "came no further in an evaluation for 1"),
        (
            "collective,evaluate",
            ["run.eval_every=5"],
            0,
            "does not leave what it is in: all ranks here wait for others",
        ),
        ("save", ["run.save_every=5"], 0, "has not completed a save for 6"),
        (
            "collective,generate",
            ["run.eval_every=50", "run.sample='1 + 1'", "plan.tp=2"],
            0,
            "does not leave what it is in: all ranks here wait for others",
        ),
        ("_enter,step", ["run.first_within=20"], 1, "has not completed the first step for 2"),
    ],
)
def test_a_rank_that_hangs_is_killed_and_the_others_go_on(
    places: str,
    sets: list[str],
    killed: int,
    said: str,
    tmp_path: Path,
    run: Run,  # noqa: F811
    undisturbed: Callable[[int], list[float]],  # noqa: F811
    monkeypatch,
):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"), prepend=":")
    monkeypatch.setenv("HANGS_IN", places)
    run.start(*sets)
    run.trains(60, world=4)
    before = run.ranks()
    before[2].send_signal(signal.SIGUSR1)
    for rank in before[4 - killed :]:
        rank.kill()
    run.nodes[0].wait_for(f"rank 2 {said}")
    run.trains(20, world=4)
    assert len(set(run.ranks()) & set(before)) == 3 - killed
    run.ends()
    same(run, undisturbed)

"""The processes of a node: how they end or leave a generation, and who takes their place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shoal.elastic import crew as room
from shoal.elastic.crew import Crew
from shoal.elastic.events import END, HALT, NOW
from shoal.elastic.events import SAVE as SAVED
from shoal.elastic.messages import Admitted, Report, Start
from shoal.elastic.worker import Worker
from shoal.errors import LaunchError, UserError
from shoal.launch.board import FIRST, SAVE, STEP, Board, Progress
from shoal.launch.fork_server import NAME

SCRIPT = """
import os, signal, sys, time
from shoal.elastic.control import Control, Left, Warm
from shoal.errors import LaunchError, UserError
if sys.argv[1] == "mistaken":
    raise UserError("the corpus is empty")
if sys.argv[1] == "broken":
    raise KeyError("x")
control = Control()
control.send(Warm())
while True:
    place = control.wait()
    told = []
    control.leave_by(told.append)
    if place.rank == place.size - 1:
        if sys.argv[1] in ("lonely", "unable"):
            unable = "2 ranks cannot" if sys.argv[1] == "unable" else ""
            control.send(Left(place.generation, 7, True, bool(unable), unable=unable))
            continue
        if sys.argv[1] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if sys.argv[1] == "raise":
            raise KeyError("bad sample")
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "finish":
        break
    while not told:
        time.sleep(0.01)
    if told[0] == "end":
        break
    if sys.argv[1] != "deaf" or place.rank:
        unsaved = "No space left on device" if sys.argv[1] == "full" else ""
        control.send(Left(place.generation, 7, True, told[0] != "now", unsaved))
"""


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    made: list[Crew] = []

    def make(what: str, ranks: int = 2) -> Crew:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        made.append(Crew(ranks, b"secret" * 4, tmp_path, lambda text: None))
        made[-1].begin(Admitted("a", 0, [str(script), what], str(tmp_path), str(tmp_path), str(script), "", 1, 1))
        return made[-1]

    yield make
    for each in made:
        each.close()


def start_of(generation: int, ranks: int) -> Start:
    return Start(generation, 0, ranks, ranks, "127.0.0.1", 1, 1, "", -1, [], generation > 1, [])


def ready(crew: Crew, ranks: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while crew.ready != ranks:
        assert crew.look() is None and time.monotonic() < deadline
        time.sleep(0.02)


def left(crew: Crew, seconds: float = 60.0) -> Report:
    deadline = time.monotonic() + seconds
    while (report := crew.look()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return report


@pytest.mark.parametrize(
    "what, how, outcome, said, ranks",
    [
        ("kill", None, "killed", "rank 1 on host", 1),
        pytest.param("finish", None, "finished", "", 0, marks=pytest.mark.matrix),
        pytest.param("raise", None, "failed", "KeyError: 'bad sample'", 1, marks=pytest.mark.matrix),
        pytest.param("stop", None, "killed", "rank 1: the process is stopped", 1, marks=pytest.mark.matrix),
        pytest.param("wait", NOW, "lost", "", 2, marks=pytest.mark.matrix),
        pytest.param("wait", HALT, "stopped", "", 2, marks=pytest.mark.matrix),
        ("full", SAVED, "stopped", "No space left on device", 2),
        pytest.param("wait", END, "stopped", "", 0, marks=pytest.mark.matrix),
        ("unable", None, "unable", "2 ranks cannot", 2),
    ],
)
def test_how_ranks_leave_a_generation_is_reported(crew, what, how, outcome, said, ranks, capfd):
    made = crew(what)
    ready(made, 2)
    made.place(start_of(1, 2))
    assert made.busy and made.ready == 0
    if how is not None:
        made.leave(how)
    report = left(made)
    assert (report.outcome, report.generation, report.ranks) == (outcome, 1, ranks) and said in report.message
    assert report.code == (5 if what == "full" else 0) or report.outcome != "stopped"
    assert report.holds == (ranks > 0) == made.holds and not made.busy
    assert report.step == (7 if ranks else -1)
    if what == "raise":
        assert "Traceback" in capfd.readouterr().err
    if what == "kill":  # it is replaced, and who has the state in memory is placed first
        survivor = made._workers[0].process.process.pid
        ready(made, 2)
        made.place(start_of(2, 2))
        assert min(made._workers, key=lambda each: each.process.rank).process.process.pid == survivor
        assert sorted(each.slot for each in made._workers) == [0, 1]


def test_a_rank_that_has_left_and_ends_before_anybody_looks_has_not_finished(crew):
    """A supervisor that stood still meanwhile: the training is not complete."""
    made = crew("lonely", 1)
    ready(made, 1)
    made.place(start_of(1, 1))
    (worker,) = made._workers
    time.sleep(0.5)  # it says that it has left
    os.kill(worker.process.process.pid, signal.SIGKILL)
    while not worker.ended:
        time.sleep(0.01)
    report = left(made, 10.0)
    assert (report.outcome, report.step, report.ranks, report.holds) == ("lost", 7, 0, False)


def test_a_step_that_a_rank_has_shown_counts_for_its_generation_alone(crew):
    """Ranks that go back to a checkpoint would be said to train the steps behind it again at each later change."""
    made = crew("wait", 1)
    ready(made, 1)
    for generation, step in ((1, 12), (2, 7)):
        made.place(start_of(generation, 1))
        if generation == 1:
            board = Board(made._workers[0]._board, lambda: None)
            board.show(STEP, step)
            board.close()
        until = time.monotonic() + 2 * room._LOOK_AT_BOARDS
        while time.monotonic() < until:
            assert made.look() is None
        made.leave(NOW)
        assert left(made).step == step


def command_line(process: int) -> str:
    return " ".join(psutil.Process(process).cmdline())


@pytest.mark.matrix
def test_processes_are_started_anew_where_none_can_be_forked(crew):
    made = crew("kill")
    ready(made, 2)
    before = {each.process.process.pid for each in made._workers}
    assert all("shoal.launch.forks" in command_line(each) for each in before)
    server = next(each for each in psutil.Process().children() if each.name() == NAME)
    server.kill()
    made.place(start_of(1, 2))
    left(made)
    ready(made, 2)
    (new,) = {each.process.process.pid for each in made._workers} - before
    assert "shoal.launch.rank" in command_line(new)


def test_a_limit_of_the_first_step_that_a_slow_host_has_met_is_twice_as_long_in_the_next_generation(tmp_path):
    said, done = list[str](), list[str]()
    made = Crew(1, b"secret" * 4, tmp_path, said.append)
    slow = SimpleNamespace(
        waits=True, trains=True, holds=False, place=None, left=None, slot=0, process=SimpleNamespace(rank=0),
        progress=lambda: Progress(-1, FIRST, 0.0, 0.0, first=10.0), is_stopped=lambda: False,
        take=lambda place: done.append("begins"), kill=lambda: done.append("is killed"), leave=lambda how: None,
    )  # fmt: skip
    made._workers = [slow]
    for generation, limit in ((1, 10.0), (2, 20.0), (3, 40.0)):
        made.place(start_of(generation, 1))
        made._watch([slow], limit - 0.1)
        assert made._hang is None
        made._watch([slow], limit + 0.6)
        assert made._hang.first and f"first step for {limit + 0.6:.0f} s (run.first_within;" in said[-1]
    assert done == ["begins", "is killed"] * 3
    made._workers = []


@pytest.mark.matrix
def test_where_a_rank_has_lost_others_those_that_wait_for_it_are_told(crew):
    made = crew("lonely")
    ready(made, 2)
    made.place(start_of(1, 2))
    report = left(made, 4.0)
    assert (report.outcome, report.ranks, report.holds) == ("lost", 2, True)


@pytest.mark.matrix
def test_a_rank_that_does_not_leave_is_killed(crew, monkeypatch):
    monkeypatch.setattr(room, "LEAST", 0.5)
    made = crew("deaf")
    ready(made, 2)
    made.place(start_of(1, 2))
    made.leave(NOW)
    report = left(made, 10.0)
    assert (report.outcome, report.ranks, report.holds) == ("lost", 1, True)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "what, outcome, named", [("deaf", "failed", "rank 0 does not leave what it is in: "), ("wait", "killed", "")]
)
def test_where_no_rank_comes_further_those_that_do_not_leave_are_named(crew, monkeypatch, what, outcome, named):
    monkeypatch.setattr(room, "LEAST", 0.5)
    where = "all_reduce (loss), collective 7 of group world"
    now = time.monotonic()
    board = Progress(8, SAVE, now - 70, now, waits=now - 70, where=where, save=1.0)
    made, said = crew(what), []
    made._say = said.append
    ready(made, 2)
    made.place(start_of(1, 2))
    made.give_up()
    assert not made.stalled and made._how is None  # all may come further
    monkeypatch.setattr(Worker, "progress", lambda self: board)
    deadline = time.monotonic() + 20
    while not made.stalled:
        assert made.look() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert made._how is None
    made.give_up()
    assert made._how == NOW and not made.stalled
    report = left(made, 10.0)
    text = f"{named}all ranks here wait for others; rank 0 is in {where} for 7"
    assert report.outcome == outcome and report.message.startswith(text) and said[-1].startswith(text)
    assert report.ranks == (1 if named else 2) and report.holds


@pytest.mark.matrix
def test_a_place_is_refused_where_a_process_has_ended_meanwhile(crew):
    made = crew("wait")
    ready(made, 2)
    os.kill(made._workers[0].process.process.pid, signal.SIGKILL)
    while made.ready == 2:
        made.look()
    with pytest.raises(LaunchError, match="1 processes wait, not 2"):
        made.place(start_of(1, 2))


@pytest.mark.parametrize("what, error", [("mistaken", UserError), ("broken", LaunchError)])
@pytest.mark.matrix
def test_a_job_that_does_not_come_to_train_ends(crew, what, error, capfd):
    made = crew(what, ranks=1)
    with pytest.raises(error, match=r"corpus is empty|KeyError"):
        ready(made, 1)

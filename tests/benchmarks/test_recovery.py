"""Figures of `recovery`: what counts as the next step, what as lost, and how jobs that never go on count."""

from __future__ import annotations

import argparse
import time
from contextlib import contextmanager

import pytest

from benchmarks import recovery, recovery_trials
from benchmarks.recovery import TARGETS, Trials, figures, joined
from benchmarks.recovery_contenders import CONTENDERS, Contender
from benchmarks.recovery_running import WORKERS, Commit, Running
from benchmarks.recovery_steady import Step, Trace, compared
from benchmarks.recovery_trials import SCENARIOS, next_step, summary

pytestmark = pytest.mark.fast


class Recorded(Running):
    """A job that has committed this."""

    def __init__(self, commits: list[Commit]) -> None:
        self._commits = commits

    def commits(self) -> list[Commit]:
        return self._commits


@pytest.mark.parametrize(
    "after, seconds, lost",
    [
        ([(0.1, 10), (0.2, 11), (0.7, 12)], 0.7, 0),  # a line of the step before, the step under way, then the next
        ([(0.1, 11), (0.3, 12)], 0.3, 0),
        ([(5.0, 6), (5.1, 7), (5.9, 11), (6.0, 12)], 6.0, 5),  # from the checkpoint of step 5
        ([], None, None),
    ],
)
def test_the_next_step_and_the_lost_ones(after, seconds, lost, monkeypatch):
    monkeypatch.setattr(recovery_trials, "LIMIT", 0.01)
    now = time.time()
    later = [Commit(now + at, step, 3) for at, step in after]
    job = Recorded([Commit(now - 1, 9, 4), Commit(now - 0.5, 10, 4), *later])
    found = next_step(job, now, 10)
    assert found["lost"] == lost
    assert found["seconds"] == (None if seconds is None else pytest.approx(seconds, abs=1e-3))


def test_a_rejoin_is_told_beside_an_undisturbed_step(monkeypatch):
    monkeypatch.setattr(recovery_trials, "STEADY", 0.2)
    now = time.time()
    times = [now + each for each in (0.01, 0.02, 0.03, 0.33, *(0.33 + 0.02 * step for step in range(1, 20)))]
    job = Recorded([Commit(at, step, 3 if at < now + 0.1 else 4) for step, at in enumerate(times)])
    job.come_back = lambda: None
    found = recovery_trials._rejoin(job)
    assert found == {"seconds": pytest.approx(0.3), "lost": 0, "step": pytest.approx(0.02, rel=0.2)}
    assert summary([found])["median_beyond_a_step_s"] == found["seconds"] - found["step"]
    assert "median_beyond_a_step_s" not in summary([{"seconds": 1.0, "lost": 0}])


def test_a_job_that_never_goes_on_is_slower_than_all_others():
    trials = [{"seconds": value, "lost": 0} for value in (1.0, 2.0, 3.0)] + [{"seconds": None, "lost": None}]
    found = summary(trials)
    assert (found["recovered"], found["trials"], found["median_s"], found["p95_s"]) == (3, 4, 2.5, None)
    assert summary(trials[:3])["p95_s"] == 3.0 and summary(trials[3:])["median_s"] is None


class Pretended(Running):
    """A job that commits a step with each look, whose workers are back as soon as they are brought back; it does not go
    on after the faults `deadly`, and says what it meets."""

    def __init__(self, met: list[str], deadly: str) -> None:
        self._commits, self._met, self._deadly, self._dead, self._world = [], met, deadly, False, WORKERS
        met.append("begins")

    def commits(self) -> list[Commit]:
        if not self._dead:
            self._commits.append(Commit(time.time(), len(self._commits) + 1000 * len(self._met), self._world))
        return self._commits

    def _meets(self, what: str, world: int) -> list:
        self._met.append(what)
        self._dead, self._world = what == self._deadly, world
        return []

    def workers(self) -> list:
        self._meets("worker", WORKERS - 1)
        return [None]

    def node(self) -> list:
        return self._meets("node", 2)

    def coordinator(self) -> list:
        return self._meets("coordinator", 2)

    def come_back(self) -> None:
        self._meets("come back", WORKERS)

    def revive(self) -> None:
        self._meets("revive", WORKERS)


def row_of_faults(monkeypatch, tmp_path, deadly: str = "", contender: str = "shoal", **given) -> tuple[list[str], dict]:
    """What a job meets in all trials, and what is found."""
    for name, value in (("LIMIT", 0.05), ("STEADY", 0.0), ("START", 1.0), ("kill", lambda *_: None)):
        monkeypatch.setattr(recovery_trials, name, value)
    met: list[str] = []

    @contextmanager
    def running(_, folder):
        yield Pretended(met, deadly)

    monkeypatch.setattr(recovery, "running", running)
    usual = {"scenarios": list(SCENARIOS), "trials": 2, "peer_trials": None, "in_a_row": 5, "give_up": 3}
    arguments = argparse.Namespace(**{**usual, **given})
    trials = Trials({contender: Contender(Pretended)}, arguments, tmp_path, lambda text: None)
    trials.measure()
    return met, trials.results()[contender]["scenarios"]


def test_a_job_takes_each_fault_once_and_has_all_workers_before_the_next(monkeypatch, tmp_path):
    met, found = row_of_faults(monkeypatch, tmp_path)
    one = ["begins", "worker", "revive", "worker", "revive", "node", "come back", "coordinator"]
    assert met == 2 * one
    assert {name: (each["recovered"], each["trials"]) for name, each in found.items()} == dict.fromkeys(
        SCENARIOS, (2, 2)
    )


def test_a_job_that_never_goes_on_is_not_asked_for_ever(monkeypatch, tmp_path):
    met, found = row_of_faults(monkeypatch, tmp_path, deadly="coordinator", trials=5)
    assert (found["coordinator"]["recovered"], found["coordinator"]["trials"]) == (0, 3)
    assert (found["kill"]["recovered"], found["kill"]["trials"]) == (5, 5)
    assert met.count("coordinator") == 3


def test_a_node_that_is_to_come_back_is_lost_first(monkeypatch, tmp_path):
    met, found = row_of_faults(monkeypatch, tmp_path, scenarios=["rejoin"], trials=1)
    assert met == ["begins", "node", "come back"] and found["rejoin"]["recovered"] == 1


@pytest.mark.parametrize(("contender", "number"), [("shoal", 3), ("torchft", 1)])
def test_peers_may_have_fewer_trials(monkeypatch, tmp_path, contender: str, number: int):
    _, found = row_of_faults(monkeypatch, tmp_path, contender=contender, trials=3, peer_trials=1)
    assert {each["trials"] for each in found.values()} == {number}


def test_a_run_about_some_faults_replaces_what_is_said_of_these_alone():
    old = {"shoal": {"note": "was", "scenarios": {"kill": 1, "node": 2}}, "ray": {"note": "", "scenarios": {"kill": 3}}}
    new = {"shoal": {"note": "is", "scenarios": {"kill": 4, "stop": 5}}, "torchft": {"note": "", "scenarios": {}}}
    assert joined(new, old, ["kill", "stop"]) == {
        "shoal": {"note": "is", "scenarios": {"kill": 4, "stop": 5, "node": 2}},
        "torchft": {"note": "", "scenarios": {}},
        "ray": {"note": "", "scenarios": {}},  # its kill is of another run than that of the others
    }


def test_targets_name_figures():
    each = {"median_s": 1.0, "most_steps_lost": 2}
    results = {"shoal": {"scenarios": dict.fromkeys(SCENARIOS, each)}}
    assert set(figures(results)) == {target.key for target in TARGETS}
    assert all(contender.note for contender in CONTENDERS.values())


def test_a_mean_step_has_the_times_and_the_work_of_its_own_steps_alone():
    trace = Trace()
    for step in range(1, 9):  # the first four are slow, and twice as busy
        slow = step <= 4
        trace.add(step, 0.2 if slow else 0.1, 0.4 * step if slow else 1.6 + 0.2 * (step - 4))
    first, last = trace.mean(0, 4), trace.mean(4, 8)
    assert (first.milliseconds, first.cpu) == pytest.approx((200, 400))
    assert (last.milliseconds, last.cpu) == pytest.approx((100, 200))


def test_a_cost_is_the_median_of_the_pairs():
    without = [Step(100, 200), Step(110, 220), Step(200, 400)]
    found = compared(without, [Step(101, 202), Step(110, 220), Step(300, 408)])
    assert found["milliseconds"]["ratio"] == pytest.approx(1.01)
    assert found["milliseconds"]["range"] == pytest.approx([1.0, 1.5])
    assert found["cpu"]["ratio"] == pytest.approx(1.01) and found["cpu"]["with"] == [202, 220, 408]

"""Figures of `recovery`: what counts as the next step, what as lost, and how jobs that never go on count."""

from __future__ import annotations

import time

import pytest

from benchmarks import recovery
from benchmarks.recovery import SCENARIOS, TARGETS, figures, summary
from benchmarks.recovery_contenders import CONTENDERS, Commit, Running

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
    monkeypatch.setattr(recovery, "LIMIT", 0.01)
    now = time.time()
    later = [Commit(now + at, step, 3) for at, step in after]
    job = Recorded([Commit(now - 1, 9, 4), Commit(now - 0.5, 10, 4), *later])
    found = recovery._next(job, now, 10)
    assert found["lost"] == lost
    assert found["seconds"] == (None if seconds is None else pytest.approx(seconds, abs=1e-3))


def test_a_job_that_never_goes_on_is_slower_than_all_others():
    trials = [{"seconds": value, "lost": 0} for value in (1.0, 2.0, 3.0)] + [{"seconds": None, "lost": None}]
    found = summary(trials)
    assert (found["recovered"], found["trials"], found["median_s"], found["p95_s"]) == (3, 4, 2.5, None)
    assert summary(trials[:3])["p95_s"] == 3.0 and summary(trials[3:])["median_s"] is None


def test_targets_name_figures():
    each = {"median_s": 1.0, "most_steps_lost": 2}
    results = {
        "contenders": {"shoal": {"scenarios": dict.fromkeys(SCENARIOS, each), "goodput": {"share": 0.5}}},
        "steady": {"ratio": 1.0},
    }
    assert set(figures(results)) == {target.key for target in TARGETS}
    assert all(contender.note for contender in CONTENDERS.values())

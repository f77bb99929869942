"""A change of the plan meets the rest of a job: evaluations, checkpoints, trackers, figures, the end of the run."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from shoal.errors import UserError
from shoal.jobs.lock import holder_of
from shoal.jobs.plans import plan_at
from shoal.jobs.replan import ask
from shoal.jobs.train import train
from shoal.plan import Plan
from shoal.report.levels import read_memory_traces
from shoal.report.metrics import PlanRecord, Record, RunRecord, StepRecord
from tests.jobs.conftest import records_of
from tests.jobs.test_replan import LAYERS, at, ranks_train


@pytest.mark.parametrize(
    ("changes", "train"),
    [
        (at((2, {"zero": 3}), (4, {"pp": 2, "zero": 0})), {"precision": "fp16"}),
        (at((2, {"tp": 2}), (4, {"tp": 1, "zero": 1})), {"precision": "bf16", "global_batch": 7, "microbatch": 1}),
        (at((2, {"pp": 2, "schedule": "2bw"}), (4, {"pp": 1, "schedule": "1f1b"})), {}),
    ],
)
def test_evaluated_saved_and_changed_after_the_same_step(quick, make_job, tmp_path, changes, train):
    """A run that stops where its plan changes, and goes on, is the run that does not stop, to the bit."""
    run = {**changes, "eval_every": 2, "save_every": 2}
    train = {"warmup": 4, "clip": 0.5, **train}
    whole = make_job(run={**run, "dir": str(tmp_path / "whole")}, model=LAYERS, **train)
    assert ranks_train(2, whole) == [6, 6]
    for steps in (4, 6):
        assert ranks_train(2, make_job(run=run, model=LAYERS, **{**train, "steps": steps})) == [steps] * 2
    mine, its = records_of(make_job()), records_of(whole)
    assert [each.step for each in its.steps] == [1, 2, 3, 4, 5, 6] and [each.step for each in its.plans] == [2, 4]
    numbers = [[(each.step, each.loss, each.lr, each.tokens, each.loss_scale, each.skipped) for each in found.steps]
               for found in (mine, its)]  # fmt: skip
    assert numbers[0] == numbers[1]
    evals = [[(each.step, each.loss, each.tokens) for each in found.evals] for found in (mine, its)]
    assert evals[0] == evals[1] and [step for step, *_ in evals[0]] == [0, 2, 4, 6]
    assert [each.step for each in its.checkpoints] == [2, 4, 6] and not its.warnings
    assert any("step 4: training ends after step 4" in each.message for each in mine.warnings)


class Seen:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def start(self, run: RunRecord) -> None:
        self.records.append(run)

    def log(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None: ...


def test_trackers_and_figures_go_on(quick, make_job, alone, monkeypatch, tmp_path):
    seen = Seen()
    monkeypatch.setattr("shoal.jobs.record.make_trackers", lambda names, run_dir: {"seen": seen})
    changes = at((3, {"memory": {"device": "64MiB"}}), (5, {"memory": "none"}))
    job = make_job(run={**changes, "norms_every": 1, "eval_every": 3}, steps=8)
    train(job, {}, alone)
    steps = [each for each in seen.records if isinstance(each, StepRecord)]
    assert [each.step for each in steps] == list(range(1, 9)) and all(each.norms for each in steps)
    assert [each.step for each in seen.records if isinstance(each, PlanRecord)] == [3, 5]
    place = [type(each) for each in seen.records].index(PlanRecord)
    assert isinstance(seen.records[place + 1], StepRecord) and seen.records[place + 1].step == 4
    records = records_of(job)
    assert {each.step for each in records.moves} == {4, 5}, "steps under the plan with tiers"
    later = next(each for each in records.moves if each.step == 5)  # step 4 is recorded, with as little as it can
    known = {name: size for name, size in later.planned.items() if size is not None}
    assert known and known == {name: later.moved[name] for name in known}
    traces = {each.step: each for each in read_memory_traces(tmp_path / "run" / "memory.jsonl")}
    budgets = {step: each.budgets.get("device") for step, each in traces.items()}
    assert budgets.keys() >= {3, 4, 5} and budgets[4] == budgets[5] == 64 * 2**20 and budgets[3] is None, (
        "each step has the budget of its plan"
    )
    assert [traces[step].counts_all for step in (3, 4, 6)] == [False, True, False]


def test_a_run_goes_on_under_a_plan_that_was_refused_only_if_it_is_mended(quick, make_job):
    changes = at((2, {"exchange": "no such"}))
    assert ranks_train(2, make_job(run=changes, steps=4)) == [4, 4]
    with pytest.raises(Exception, match=r"run.at, the plan after step 4: plan.exchange = .no such."):
        ranks_train(2, make_job(run=changes))
    assert ranks_train(2, make_job(run=at((2, {"zero": 1})))) == [6, 6]


def asked_when_it_starts(run_dir: Any, change: dict[str, Any], said: list[Any]) -> threading.Thread:
    def asking() -> None:
        while holder_of(run_dir) is None:
            time.sleep(0.01)
        try:
            said.append(ask(run_dir, change))
        except UserError as error:
            said.append(str(error))

    thread = threading.Thread(target=asking)
    thread.start()
    return thread


def test_a_request_before_the_first_step_and_one_that_comes_too_late(make_job, tmp_path):
    run_dir, said = tmp_path / "run", list[Any]()
    asker = asked_when_it_starts(run_dir, {"zero": 3}, said)
    assert ranks_train(2, make_job(steps=3, run={"eval_every": 1, "save_every": 1})) == [3, 3]
    asker.join()
    assert said[0]["step"] == 1 and said[0]["plan"] == {"dp": 2, "zero": 3}
    asker = asked_when_it_starts(run_dir, {"zero": 1}, said)
    assert ranks_train(2, make_job(steps=4)) == [4, 4]
    asker.join()
    assert "has ended before it changed its plan" in said[1] and not list(run_dir.glob("replan*"))
    assert [(each.step, each.plan.get("zero")) for each in records_of(make_job()).plans] == [(1, 3)]


def test_a_table_of_a_change_takes_the_place_of_the_whole_table(make_job):
    job = replace(make_job(run=at((2, {"memory": {"host": "1GiB"}}))), plan=Plan(memory={"device": "1GiB"}))
    assert plan_at(job, 2, 1).memory == {"host": "1GiB"}

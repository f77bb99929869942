"""The evaluator of a run: what it evaluates, records and leaves out, and when it takes the training for ended."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import UserError
from shoal.jobs import evaluator
from shoal.jobs.choose import Settled, Sizes, settle
from shoal.jobs.config import Job
from shoal.jobs.evaluator import follow
from shoal.jobs.export import evaluate_run
from shoal.jobs.train import train
from shoal.jobs.write import write_resolved
from shoal.report.evaluations import read_evaluations
from tests.jobs.conftest import records_of

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("quick")]


@pytest.fixture(autouse=True)
def sparing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "LOOK_SECONDS", 0.01)


def test_it_finds_what_the_run_found_itself(make_job, alone, capsys):
    job = make_job(run={"save_every": 2, "eval_every": 2, "at": [{"step": 3, "plan": {"zero": 0}}]})
    train(replace(job, run=replace(job.run, at=[])), world=alone)
    follow(job, {})
    found = read_evaluations(Path(job.run.dir))
    assert [each.step for each in found] == [2, 4, 6]
    assert found == records_of(job).evals[1:]  # to the bit
    said = capsys.readouterr().out
    assert f"step 6: validation loss {found[-1].loss:.4f}" in said and said.endswith("training has ended\n")
    follow(job, {})  # once more, as an evaluator that was started anew
    assert read_evaluations(Path(job.run.dir)) == found
    assert len((Path(job.run.dir) / "evaluations.jsonl").read_text().splitlines()) == 3


def test_a_run_whose_plan_changes_is_evaluated_by_one_process(make_job, alone):
    job = make_job()
    train(job, world=alone)
    run_dir, change = Path(job.run.dir), [{"step": 3, "plan": {"tp": 2}}]
    before = evaluate_run(run_dir)[0].loss
    settled = settle(job, {}, Sizes(1, 1)).job
    write_resolved(replace(settled, run=replace(settled.run, at=change)), {}, run_dir)
    assert evaluate_run(run_dir)[0].loss == before


def test_it_follows_a_run_that_begins_later_and_goes_on_after_another(make_job, alone):
    """The end of an attempt that was over before says nothing about the one that comes."""
    first, job = make_job(steps=2), make_job(steps=6, run={"save_every": 2, "eval_every": 2})
    train(first, world=alone)
    thread = threading.Thread(target=follow, args=(job, {}))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    train(job, world=alone)
    thread.join(30.0)
    assert not thread.is_alive()
    found = read_evaluations(Path(job.run.dir))
    assert [each.step for each in found] == [2, 4, 6]
    own = {each.step: each.loss for each in records_of(job).evals}
    assert [each.loss for each in found] == [own[each.step] for each in found]


def test_nothing_held_out_is_refused_and_the_remedy_works(make_job, alone):
    with pytest.raises(UserError, match=r"data.validation = 0: .* Give data.validation a share above 0"):
        follow(make_job(data={"validation": 0.0}), {})
    job = make_job(data={"validation": 0.1})
    train(job, world=alone)
    follow(job, {})
    assert [each.step for each in read_evaluations(Path(job.run.dir))] == [6]


def test_a_checkpoint_that_the_run_removed_is_left_out_and_a_damaged_one_is_an_error(make_job, alone):
    job = make_job()
    train(job, world=alone)
    watched = evaluator._Evaluation(settle(job, {}, Sizes(1, 1)))
    watched.of(3, Path(job.run.dir) / "checkpoints/step-00000003")
    assert read_evaluations(Path(job.run.dir)) == ()
    path = Path(job.run.dir) / "checkpoints/step-00000006"
    next(path.glob("*.distcp")).write_bytes(b"")
    with pytest.raises(Exception, match="step-00000006"):
        watched.of(6, path)
    watched.close()


def test_a_full_disk_is_said_and_another_evaluator_makes_up_for_it(make_job, alone, monkeypatch):
    job = make_job(run={"save_every": 3})
    train(job, world=alone)
    written = evaluator.MetricsLog.write

    def full(self, entry):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluator.MetricsLog, "write", full)
    with pytest.raises(UserError, match=r"step 3 cannot be written to .*evaluations.jsonl.*start the evaluator again"):
        follow(job, {})
    monkeypatch.setattr(evaluator.MetricsLog, "write", written)

    def no_report(run_dir):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(evaluator, "write_report", no_report)
    follow(job, {})
    assert [each.step for each in read_evaluations(Path(job.run.dir))] == [3, 6]


@pytest.fixture
def attempts(make_job, monkeypatch) -> Callable[..., tuple[evaluator._Ending, Settled]]:
    """Makes the ending of a run of 6 steps whose directory holds nothing yet."""

    def make(**train: object) -> tuple[evaluator._Ending, Settled]:
        job: Job = make_job(**train)
        Path(job.run.dir).mkdir()
        return evaluator._Ending(Path(job.run.dir)), settle(job, {}, Sizes(1, 1))

    return make


def record(settled: Settled, *lines: str, end: str = "\n") -> None:
    """Appends to the run's metrics.jsonl: "run", or the reason of an end."""
    with (Path(settled.job.run.dir) / "metrics.jsonl").open("a") as file:
        for line in lines:
            kind = {"kind": "run"} if line == "run" else {"kind": "end", "reason": line, "seconds": 1.0}
            file.write(json.dumps(kind) + end)


@pytest.mark.parametrize("reason, over", [("failed: no", True), ("all 6 steps", True), ("stopped by SIGTERM", False)])
def test_an_attempt_that_ended_by_itself_is_the_end(attempts, reason: str, over: bool) -> None:
    ending, settled = attempts()
    assert not ending.has_come(settled)
    record(settled, "run")
    assert not ending.has_come(settled)
    record(settled, reason, end="")
    assert not ending.has_come(settled)  # half a line
    with (Path(settled.job.run.dir) / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert ending.has_come(settled) is over
    record(settled, "run")
    assert not ending.has_come(settled)  # it goes on


def test_the_limits_of_the_job_are_the_end_of_one_that_ended_before(attempts, monkeypatch) -> None:
    ending, settled = attempts(steps=None, seconds=5.0)
    record(settled, "run", "the time limit was reached")
    ending = evaluator._Ending(Path(settled.job.run.dir))
    assert not ending.has_come(settled)
    spent = {"seconds": 4.0}
    checkpoint = Path(settled.job.run.dir) / "checkpoints/step-00000006"
    monkeypatch.setattr(evaluator, "completed", lambda directory: [(6, checkpoint)])
    monkeypatch.setattr(evaluator, "read_manifest", lambda path: type("M", (), {"extra": {"user": spent}}))
    assert not ending.has_come(settled)  # the job has more seconds than the attempt before had
    spent["seconds"] = 5.0
    assert ending.has_come(settled)
    record(settled, "run")
    assert not ending.has_come(settled)  # the last evaluation and the report are under way
    monkeypatch.setattr(evaluator, "END_SECONDS", -1.0)
    assert ending.has_come(settled)  # it was killed meanwhile

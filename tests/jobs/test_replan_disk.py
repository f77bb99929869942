"""A job that changes its plan, with a budget or a disk: what is too small is refused beforehand, and an update on a
disk is found again, whatever plan it was made under."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from filelock import FileLock

from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import StorageError, UserError
from shoal.jobs import train as training
from shoal.jobs.config import Job
from shoal.jobs.export import evaluate_run, generate_text
from shoal.jobs.train import train
from shoal.jobs.trials import Candidate, Trials, write
from shoal.jobs.trying import STEPS
from shoal.plan import Plan
from tests.jobs.conftest import in_cache, losses_of, records_of
from tests.jobs.test_replan import at, ranks_train
from tests.pool import RankError, disposable_ranks


def killed_after(world: World, cache: str, job: Job, step: int) -> None:
    """Trains, and is killed once the update of `step` is on the disk."""
    made = Engine.step

    def dies(running: Engine, batch: Any) -> Any:
        if running.step_index == step:
            running.optimizer.settle()
            os.kill(os.getpid(), signal.SIGKILL)
        return made(running, batch)

    with patch.object(Engine, "step", dies):
        in_cache(world, cache, job)


def kill_after(step: int, size: int, job: Job) -> None:
    cache = os.environ["XDG_CACHE_HOME"]
    with disposable_ranks(killed_after, size, cache, job, step) as ranks:
        for rank in ranks:
            with pytest.raises(RankError, match="killed by SIGKILL"):
                rank.result()


@pytest.fixture
def whole(make_job, alone, quick, tmp_path) -> Job:
    """The job on one rank, without a change, trained."""
    job = make_job(run={"dir": str(tmp_path / "whole")}, precision="fp64")
    train(job, {}, alone)
    return job


@pytest.mark.parametrize("save_every", [0, 1])
def test_an_update_under_a_later_plan_is_found_again(quick, make_job, whole, alone, tmp_path, save_every):
    """The plan of the newest checkpoint, or of the beginning, has no disk."""
    changes = at((2, {"memory": {"disk": str(tmp_path / "disk")}}))
    job = make_job(run={**changes, "save_every": 0}, precision="fp64")
    if save_every:
        train(make_job(steps=1, precision="fp64"), {}, alone)
    kill_after(4, 1, job)
    train(job, {}, alone)
    records = records_of(job)
    assert [each.step for each in records.steps] == [1, 2, 3, 4, 5, 6] and not records.warnings
    assert losses_of(job) == pytest.approx(losses_of(whole), rel=1e-10)


def test_an_update_under_a_plan_that_the_file_no_longer_has(quick, make_job, whole, alone, tmp_path):
    def with_chunks_of(size: str, **run: Any) -> Job:
        memory = {"disk": str(tmp_path / "disk"), "chunk": size}
        return replace(make_job(run=run, precision="fp64"), plan=Plan(memory=memory))

    kill_after(3, 1, with_chunks_of("64KiB"))
    job = with_chunks_of("4KiB")
    train(job, {}, alone)
    assert [each.step for each in records_of(job).steps] == [1, 2, 3, 4, 5, 6] and not records_of(job).warnings
    assert losses_of(job) == pytest.approx(losses_of(whole), rel=1e-10)


def test_what_reads_a_run_leaves_its_disk_alone(quick, make_job, whole, alone, tmp_path, capsys):
    """Also while another process trains there, and between a kill and the attempt that goes on from the update."""
    plan = Plan(memory={"disk": str(tmp_path / "disk")})
    job = replace(make_job(run={"save_every": 2}, precision="fp64"), plan=plan)
    kill_after(3, 1, job)
    with FileLock(tmp_path / "disk" / "rank-0" / "lock"):
        found = evaluate_run(tmp_path / "run")[0]
        assert generate_text(tmp_path / "run", "1 + ", tokens=2) is not None
    assert found.loss > 0 and capsys.readouterr().err == ""
    train(job, {}, alone)
    assert "resumed from step 3, the last update on the disk of plan.memory" in capsys.readouterr().out
    assert losses_of(job) == pytest.approx(losses_of(whole), rel=1e-10)
    assert evaluate_run(tmp_path / "run")[0].loss == pytest.approx(records_of(job).evals[-1].loss, rel=1e-12)


@pytest.mark.parametrize("error", [UserError, StorageError])
def test_a_plan_to_be_tried_that_is_refused_is_passed_over_where_an_update_is_on_the_disk(
    quick, make_job, tmp_path, alone, capsys, monkeypatch, error
):
    """Which was made under another one: it is taken over, and training goes on under the next."""
    memory, steps = {"disk": str(tmp_path / "disk")}, 2 * STEPS + 4
    plans = [{"memory": memory}, {"memory": memory, "zero": 1}, {"memory": memory, "recompute": "full"}]
    whole = make_job(run={"dir": str(tmp_path / "whole")}, precision="fp64", steps=steps)
    train(whole, {}, alone)
    write(tmp_path / "run", Trials("key", 2, tuple(Candidate(each, 0.1) for each in plans)))
    job = replace(make_job(precision="fp64", steps=steps), plan=Plan(memory=memory))
    kill_after(3, 1, job)
    replan = Engine.replan

    def refuses(engine: Engine, plan: Plan) -> None:
        if plan.zero:
            raise error("no such plan")
        replan(engine, plan)

    monkeypatch.setattr(Engine, "replan", refuses)
    train(job, {}, alone)
    said, records = capsys.readouterr().out, records_of(job)
    assert re.search(r'^plan\.recompute +"full" +planner', said, re.M)
    assert "resumed from step 3, the last update" in said and not records.warnings
    assert [(each.step, each.plan, each.why) for each in records.tried] == [
        (3, plans[1], "no such plan"),
        (3 + STEPS, plans[2], ""),
        (3 + 2 * STEPS, plans[0], ""),  # under which the run was killed
    ]
    assert [each.step for each in records.steps] == list(range(1, steps + 1))
    assert losses_of(job) == pytest.approx(losses_of(whole), rel=1e-10)


def test_the_plan_of_an_update_that_is_refused_now_is_named_with_what_to_do(
    quick, make_job, tmp_path, alone, monkeypatch
):
    """And no plan that is to be tried is blamed for it."""
    plans = [{"memory": {"disk": str(tmp_path / "disk")}, "recompute": each} for each in ("full", "none")]
    write(tmp_path / "run", Trials("key", 2, tuple(Candidate(each, 0.1) for each in plans)))
    job = replace(make_job(), plan=Plan.from_dict(plans[0]))
    kill_after(3, 1, job)
    made, asked = training.make_engine, []

    def refuses(job: Job, *others: Any) -> Engine:
        asked.append(job.plan)
        if job.plan.recompute == "full":
            raise UserError("this has too little memory")
        return made(job, *others)

    monkeypatch.setattr(training, "make_engine", refuses)
    with pytest.raises(UserError, match=r"update of step 3 .*to go on from step 0 instead\): this has too little"):
        train(job, {}, alone)
    assert len(asked) == 1 and not records_of(job).tried
    elsewhere = {"disk": str(tmp_path / "elsewhere")}
    train(replace(job, plan=Plan(memory=elsewhere)), {}, alone)
    assert [each.step for each in records_of(job).steps] == [1, 2, 3, 4, 5, 6] and asked[1].memory == elsewhere


def test_an_update_that_cannot_be_taken_over_is_told(quick, make_job, alone, tmp_path):
    """It is of two ranks, and there is one."""
    plan = Plan(memory={"disk": str(tmp_path / "disk")})
    job = replace(make_job(), plan=plan)
    kill_after(3, 2, replace(job, plan=replace(plan, dp=2, zero=3)))
    train(job, {}, alone)
    (warning,) = records_of(job).warnings
    assert "the update of step 3 on the disk of plan.memory cannot be taken over" in warning.message
    assert "it is of 2 ranks, and these are 1" in warning.message and "goes on from step 0" in warning.message
    assert records_of(job).steps[-1].step == 6


def test_a_budget_that_is_too_small_is_refused_before_the_plan_changes(quick, make_job, tmp_path):
    changes = at((2, {"memory": {"device": "1KiB"}}), (4, {"memory": {"device": "64MiB"}, "zero": 3}))
    job, plain = make_job(run=changes), make_job(run={"dir": str(tmp_path / "plain")})
    assert ranks_train(2, job) == [6, 6] and ranks_train(2, plain) == [6, 6]
    (warning,) = records_of(job).warnings
    assert "after step 2 the plan stays as it is: plan.memory.device = 1,024 bytes: a step needs" in warning.message
    assert [each.step for each in records_of(job).plans] == [4]
    assert losses_of(job)[:4] == losses_of(plain)[:4], "the prediction changes nothing"
    assert losses_of(job)[4:] == pytest.approx(losses_of(plain)[4:], rel=1e-5)

"""A job changes its plan while it trains: at the steps that it gives, and when somebody asks for it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from shoal import checkpoint
from shoal.comm import World
from shoal.errors import UserError
from shoal.jobs import replan
from shoal.jobs.config import Job, Run
from shoal.jobs.lock import Holder, holder_of, locked
from shoal.jobs.plans import changed, plan_at
from shoal.jobs.read import load_job, parse_job, plan_assignments, plan_pins
from shoal.jobs.record import Recorder
from shoal.jobs.replan import ANSWERED, REQUEST, ask
from shoal.jobs.train import train
from shoal.plan import Plan
from shoal.replace import replace_text
from shoal.report.page import write_report
from tests.jobs.conftest import in_cache, losses_of, records_of
from tests.pool import run_ranks

LAYERS = {"layers": 2, "tied": False}


def at(*changes: tuple[int, dict]) -> dict:
    return {"at": [{"step": step, "plan": plan} for step, plan in changes]}


def ranks_train(size: int, job: Job) -> list[int]:
    return run_ranks(in_cache, size, os.environ["XDG_CACHE_HOME"], job)


def test_the_plan_changes_at_the_steps_of_the_job(quick, make_job, tmp_path):
    whole = make_job(run={"dir": str(tmp_path / "whole")}, model=LAYERS, precision="fp64")
    train(whole, {}, World.single("cpu"))
    changes = at((2, {"zero": 3}), (3, {"pp": 2, "zero": 0}), (5, {"pp": 1, "tp": 2}))
    job = make_job(run={**changes, "save_every": 2}, model=LAYERS, precision="fp64")
    assert ranks_train(2, job) == [6, 6]
    assert losses_of(job) == pytest.approx(losses_of(whole), rel=1e-10)
    records = records_of(job)
    assert [(each.step, each.plan) for each in records.plans] == [
        (2, {"dp": 2, "zero": 3}),
        (3, {"pp": 2}),
        (5, {"tp": 2}),
    ]
    assert not records.warnings and [each.step for each in checkpoint.listing(tmp_path / "run/checkpoints")] == [
        6,
        4,
        2,
    ]
    assert load_job(tmp_path / "run" / "resolved.toml")[0].run.at == changes["at"]
    html = write_report(tmp_path / "run").read_text()
    assert 'data-marks="[2, 3, 5]"' in html and "After step 3 the plan was changed" in html and ">plan</text>" in html


def test_a_run_that_goes_on_begins_under_the_plan_of_its_step(quick, make_job):
    changes = at((2, {"zero": 3}), (4, {"pp": 2, "zero": 0}))
    first = make_job(run=changes, model=LAYERS, steps=3)
    assert ranks_train(2, first) == [3, 3]
    assert ranks_train(2, make_job(run=changes, model=LAYERS)) == [6, 6]
    assert [each.step for each in records_of(first).plans] == [2, 4]
    assert [each.step for each in records_of(first).steps] == [1, 2, 3, 4, 5, 6]


def test_a_plan_that_is_refused_is_a_warning_and_training_goes_on(quick, make_job):
    job = make_job(run=at((2, {"exchange": "no such"}), (3, {"zero": 1})))
    assert ranks_train(2, job) == [6, 6]
    (warning,) = records_of(job).warnings
    assert "after step 2 the plan stays as it is" in warning.message and "no such" in warning.message
    assert [each.plan for each in records_of(job).plans] == [{"dp": 2, "zero": 1}]


def with_a_full_disk(world: World, cache: str, job: Job) -> int:
    """Rank 1's disk has no room for the checkpoint of step 3, which is under way when the plan changes."""
    written = checkpoint.save.dcp.write_pieces

    def full(path, rank, pieces):
        if rank == 1 and path.name.startswith("step-00000003"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, rank, pieces)

    with patch.object(checkpoint.save.dcp, "write_pieces", full):
        return in_cache(world, cache, job)


def test_a_save_that_fails_meanwhile_is_told(make_job, tmp_path):
    job = make_job(run={**at((3, {"zero": 2})), "save_every": 3})
    assert run_ranks(with_a_full_disk, 2, os.environ["XDG_CACHE_HOME"], job) == [6, 6]
    assert any("No space left" in warning.message for warning in records_of(job).warnings)
    assert [each.plan for each in records_of(job).plans] == [{"dp": 2, "zero": 2}]
    assert [each.step for each in checkpoint.listing(tmp_path / "run" / "checkpoints")] == [6]


def test_a_run_is_asked_while_it_trains(make_job, tmp_path):
    run_dir, said = tmp_path / "run", list[object]()

    def asking() -> None:
        while holder_of(run_dir) is None or not (run_dir / "metrics.jsonl").exists():
            time.sleep(0.05)
        try:
            said.append(ask(run_dir, {"zero": 3}))
            for wrong in ({"dp": 3}, {"exchange": "no such"}, {"zeros": 3}):
                with pytest.raises(UserError) as error:
                    ask(run_dir, wrong)
                said.append(str(error.value))
            (run_dir / REQUEST.format("wrong")).write_text("no JSON")
            while not (answer := (run_dir / REQUEST.format("wrong")).with_suffix(ANSWERED)).exists():
                time.sleep(0.05)
            answer.unlink()
            with ThreadPoolExecutor() as pool:
                said.extend(pool.map(partial(ask, run_dir), [{"zero": 2}] * 3))  # at once: each has its answer
            said.append(ask(run_dir, {"tp": 2, "zero": 0}))
        except BaseException as error:
            said.append(error)
        os.kill(json.loads((run_dir / "run.lock").read_text())["pid"], signal.SIGINT)

    asker = threading.Thread(target=asking)
    asker.start()
    steps = ranks_train(2, make_job(steps=1_000_000, microbatch=None))
    asker.join()
    first, size, exchange, field, *alike, second = said
    assert [each["plan"] for each in alike] == [{"dp": 2, "zero": 2}] * 3
    assert isinstance(first, dict) and first["plan"] == {"dp": 2, "zero": 3} and 0 < first["step"] < steps[0]
    assert isinstance(second, dict) and second["plan"] == {"tp": 2} and second["step"] >= first["step"]
    assert "3 ranks" in size and "no such" in exchange and 'Did you mean "zero"' in field
    assert [each.plan for each in records_of(make_job()).plans][-1] == {"tp": 2}
    assert not list(run_dir.glob("replan*")), "nothing is left of requests"
    with pytest.raises(UserError, match="no run trains in"):
        ask(run_dir, {"zero": 1})


@pytest.mark.parametrize("go_on", [True, False])
def test_an_asker_waits_for_those_that_go_on_when_rank_0_has_ended(tmp_path, monkeypatch, go_on: bool):
    monkeypatch.setattr(replan, "OTHERS_SECONDS", 30.0 if go_on else 0.5)
    first = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = Holder.here()
    lock, holder = tmp_path / "run.lock", replace(here, pid=first.pid, started=psutil.Process(first.pid).create_time())
    lock.write_text(json.dumps(asdict(replace(holder, job="a job"))))
    with ThreadPoolExecutor() as pool:
        answered = pool.submit(ask, tmp_path, {"zero": 3})
        while not list(tmp_path.glob("replan*")):
            time.sleep(0.01)
        first.communicate()
        time.sleep(3 * replan.LOOK_SECONDS)
        if not go_on:
            with pytest.raises(UserError, match="has ended before it changed its plan"):
                answered.result(10)
            return
        assert not answered.done()
        replace_text(lock, json.dumps(asdict(replace(here, job="a job", taken=2))))
        (request,) = tmp_path.glob("replan*")
        while json.loads(request.read_text())["run"]["taken"] != 2:
            time.sleep(0.01)
        answer = {"step": 7, "plan": {"zero": 3}, "refused": None}
        replace_text(request.with_suffix(ANSWERED), json.dumps(answer))
        assert answered.result(10) == answer


def test_a_request_that_was_left_behind_reaches_no_later_attempt(quick, make_job, tmp_path):
    """An asker that was killed leaves its request, and may leave an answer; the run goes on under its own plan."""
    run_dir, job = tmp_path / "run", make_job(steps=3)
    assert ranks_train(2, job) == [3, 3]
    asked = {"host": socket.gethostname(), "pid": 1, "started": 1.0, "taken": 1}
    left = run_dir / REQUEST.format("1-killed")
    left.write_text(json.dumps({"run": asked, "plan": {"zero": 3}}))
    left.with_suffix(ANSWERED).write_text("{}")
    assert ranks_train(2, make_job(steps=6)) == [6, 6]
    records = records_of(job)
    assert not records.plans and not list(run_dir.glob("replan*"))
    assert [left.name in each.message and "earlier attempt" in each.message for each in records.warnings].count(True)


def test_an_attempt_is_known_from_the_one_before_in_the_same_process(tmp_path, alone):
    holders = []
    for _ in range(2):
        with locked(tmp_path, alone.everyone):
            holders.append(holder_of(tmp_path))
    assert holder_of(tmp_path) is None and holders[0] != holders[1] and holders[0].pid == holders[1].pid


def test_what_the_degrees_leave_of_the_ranks_is_dp():
    assert changed(Plan(dp=8, zero=2), {"tp": 2}, 8) == Plan(dp=4, tp=2, zero=2)
    assert changed(Plan(dp=4, zero=2, shard=2), {"zero": 0}, 4) == Plan(dp=4)
    assert changed(Plan(pp=2, dp=2, stages=(1, 3)), {"pp": 1}, 4) == Plan(dp=4)
    assert changed(Plan(dp=2, pp=2, stages=(1, 3)), {"pp": 4}, 4) == Plan(pp=4)
    assert changed(Plan(pp=2, stages=(1, 3)), {"schedule": "zbv"}, 2) == Plan(pp=2, schedule="zbv")
    assert changed(Plan(pp=2, stages=(1, 3)), {"zero": 1, "pp": 2}, 2) == Plan(pp=2, stages=(1, 3), zero=1)
    assert changed(Plan(dp=2, pp=2, stages="counted"), {"pp": 4}, 4) == Plan(pp=4, stages="counted")
    assert changed(Plan(dp=2, zero=3, memory={}), {"memory": "none", "recompute": "none"}, 2) == Plan(dp=2, zero=3)
    assert changed(Plan(dp=4), {"dp": 2, "cp": 2}, 4) == Plan(dp=2, cp=2)
    with pytest.raises(UserError, match="3 ranks"):
        changed(Plan(dp=4), {"tp": 3}, 4)


def test_the_plan_of_a_step_has_all_changes_until_then(make_job):
    job = replace(make_job(run=at((2, {"zero": 1}), (5, {"tp": 2}))), plan=Plan(dp=2))
    assert [plan_at(job, step, 2) for step in (0, 1, 2, 4, 5, 9)] == [
        *[Plan(dp=2)] * 2,
        *[Plan(dp=2, zero=1)] * 2,
        *[Plan(tp=2, zero=1)] * 2,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"step": 3}], "run.at[0]"),
        ([{"step": 3, "plan": {}}], "what changes of the plan"),
        ([{"step": 0, "plan": {"zero": 1}}], "run.at[0].step = 0"),
        ([{"step": 3, "plan": {"zero": 1}}, {"step": 3, "plan": {"zero": 2}}], "run.at[1].step = 3"),
        ([{"step": "3", "plan": {"zero": 1}}], "run.at[0].step = '3'"),
        ([{"step": 3, "plan": {"zero": 1}, "dp": 2}], "run.at[0]"),
    ],
)
def test_changes_that_say_nothing_are_refused(changes, message):
    with pytest.raises(UserError) as error:
        Run(at=changes)
    assert message in str(error.value)


def test_the_file_gives_changes_as_tables(tmp_path: Path):
    text = '[model]\nname = "gpt"\n[train]\nsteps = 9\n[[run.at]]\nstep = 4\nplan.tp = 2\nplan.zero = 1\n'
    (tmp_path / "job.toml").write_text(text)
    assert load_job(tmp_path / "job.toml")[0].run.at == [{"step": 4, "plan": {"tp": 2, "zero": 1}}]
    with pytest.raises(UserError, match="expected a list of tables"):
        parse_job({"model": {"name": "gpt"}, "train": {"steps": 1}, "run": {"at": 3}})


def test_only_the_plan_can_be_asked_for():
    assert plan_assignments(["plan.zero=3", "plan.memory.host=1GiB"]) == {"zero": 3, "memory": {"host": "1GiB"}}
    with pytest.raises(UserError, match="only its plan can change"):
        plan_assignments(["train.lr=1"])
    with pytest.raises(UserError, match="Did you mean"):
        plan_assignments(["plan.zeros=1"])
    for asks in ("plan=auto", "plan.measure=3"):
        with pytest.raises(UserError, match=r"the planner is not asked while a run trains; .* --set plan=auto, which"):
            plan_assignments([asks])


def test_only_what_a_plan_can_have_is_pinned():
    assert plan_pins(["tp=8", "memory.host=1GiB", "zero=1"]) == {
        "tp": 8,
        "memory": {"host": "1GiB"},
        "zero": 1,
    }
    for pin, why in (
        ("tp", "--pin tp: write it as key=value"),
        ("tp=", "--pin tp=: write it as"),
        ("tp=x", "plan.tp in --pin tp=x: expected a whole number"),
        ("tpp=2", 'a plan has no key "tpp". Did you mean "tp"?'),
        ("plan.tp=2", "Write --pin tp=2."),
        ("microbatch=4", "Write --set train.microbatch=4."),
        ("name=auto", 'a plan has no key "name"'),
        ("shares=3", "expected a list of numbers, not the whole number 3"),
        ("stages=4", "expected a list of whole numbers or a list of lists of texts or a text or a table, not"),
        ("zero.a=1", "plan.zero in --pin zero.a=1: expected a whole number"),
    ):
        with pytest.raises(UserError, match=re.escape(why)):
            plan_pins([pin])


def test_a_step_without_a_change_reads_no_numbers(quick, make_job, alone, monkeypatch):
    """Numbers of a step are read later where reading them waits; a change of the plan reads them all."""
    pauses = []
    pause = Recorder.pause
    monkeypatch.setattr(Recorder, "pause", lambda recorder: pauses.append(recorder) or pause(recorder))
    train(make_job(run=at((2, {"recompute": "full"}))), {}, alone)
    assert len(pauses) == 3, "two evaluations, and one change"

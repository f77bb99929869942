"""`plan.measure`: plans are tried in the run itself, no step is lost, and the fastest stays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from shoal.comm import World
from shoal.errors import UserError
from shoal.jobs import asking, automatic
from shoal.jobs.automatic import pinned, planned
from shoal.jobs.choose import settle, under
from shoal.jobs.config import Auto, Job
from shoal.jobs.read import load_job, parse_job
from shoal.jobs.train import train
from shoal.jobs.trials import FILE, KEPT, Candidate, Trials, key_of, of_candidates, read, write
from shoal.jobs.trying import STEPS
from shoal.plan import Plan
from tests.jobs.conftest import in_cache, losses_of, records_of
from tests.pool import run_ranks

LAYERS = {"layers": 2, "tied": False}


def ranks_train(size: int, job: Job) -> list[int]:
    return run_ranks(in_cache, size, os.environ["XDG_CACHE_HOME"], job)


GIVEN = {"model": LAYERS, "precision": "fp64", "microbatch": 2, "schedule": "constant"}


def trials(**more: object) -> Trials:
    plans = [{"dp": 2}, {"dp": 2, "exchange": "no such"}, {"dp": 2, "zero": 1}]
    return Trials("key", 2, tuple(Candidate(plan, 0.1) for plan in plans), **more)  # type: ignore[arg-type]


def test_a_run_that_was_stopped_goes_on_trying_and_no_step_is_lost(quick, make_job, tmp_path):
    cut, steps = STEPS + 1, 2 * STEPS + 3
    whole = make_job(run={"dir": str(tmp_path / "whole")}, steps=steps, **GIVEN)
    train(whole, {}, World.single("cpu"))
    write(tmp_path / "run", trials())
    first = replace(make_job(steps=cut, **GIVEN), plan=Plan(dp=2))
    assert ranks_train(2, first) == [cut] * 2
    kept = read(tmp_path / "run")
    assert kept is not None and kept.now is None and kept.next == 2  # the second is refused, the third begins again
    assert ranks_train(2, replace(first, train=replace(first.train, steps=steps))) == [steps] * 2
    records = records_of(first)
    assert losses_of(first) == pytest.approx(losses_of(whole), rel=1e-10)
    assert [each.step for each in records.steps] == list(range(1, steps + 1))
    one, two, three = records.tried
    assert one.seconds and three.seconds and two.seconds is None and "no such" in two.why
    assert {3, 4, cut + 3} <= {each.step for each in records.terms}, "steps under each that was tried"
    assert (one.step, three.step) == (STEPS, cut + STEPS) and not records.warnings
    fastest = one.plan if one.seconds <= three.seconds else three.plan
    resolved = tmp_path / "run" / "resolved.toml"
    assert load_job(resolved)[0].plan.to_dict() == fastest
    assert resolved.read_text().count("s a step, ") == 2 and "passed over" in resolved.read_text()


def test_what_the_engine_refuses_as_a_run_begins_is_passed_over(quick, make_job, tmp_path, capsys):
    plans = (Candidate({"exchange": "no such"}, 0.1), Candidate({}, 0.1), Candidate({"recompute": "full"}, 0.1))
    write(tmp_path / "run", Trials("key", 2, plans))
    job = make_job(steps=2 * STEPS + 1, microbatch=2, model=LAYERS)
    train(job, {}, World.single("cpu"))
    refused, first, second = records_of(job).tried
    assert (refused.step, refused.seconds, refused.plan) == (0, None, {"exchange": "no such"})
    assert "no such" in refused.why and (first.step, second.step) == (STEPS, 2 * STEPS)
    said, run = capsys.readouterr().out, records_of(job).run
    assert "tried exchange" in said and re.search(r"^plan\.exchange", said, re.M) is None, "it has its default again"
    assert run is not None and run.config["plan.exchange"] == {"value": "allreduce", "origin": "default"}
    assert 'exchange = "allreduce"  # default' in (tmp_path / "run" / "resolved.toml").read_text()
    write(tmp_path / "run", Trials("key", 2, plans[:1]))
    with pytest.raises(UserError, match="no such"):
        train(replace(job, plan=Plan(exchange="no such")), {}, World.single("cpu"))


def test_steps_that_loss_scaling_skips_measure_nothing(quick, make_job, tmp_path):
    plans = (Candidate({}, 0.1), Candidate({"recompute": "full"}, 0.1))
    write(tmp_path / "run", Trials("key", 2, plans))
    scaled = {"name": "fp16", "initial_scale_power": 24, "hysteresis": 1}
    job = make_job(model=LAYERS, microbatch=2, precision=scaled, lr=1e-4, steps=20)
    train(job, {}, World.single("cpu"))
    records = records_of(job)
    full = [each.step for each in records.steps if not each.skipped]
    skipped = len(records.steps) - len(full)
    assert skipped > 1, "the test wants steps that are skipped"
    assert [each.step for each in records.tried] == [full[STEPS - 1], full[2 * STEPS - 1]]


def test_a_run_that_goes_on_after_its_trials_says_which_plan_was_the_fastest(quick, make_job, tmp_path, capsys):
    job = replace(make_job(steps=1, microbatch=2), auto=Auto(True, 2))
    settled = settle(job, {}, World.single("cpu"))
    key = key_of(settled.job, settled.origins, pinned(settled.job, settled.origins), 1)
    write(tmp_path / "run", Trials(key, 2, (Candidate({}, 0.1, 0.3), Candidate({"recompute": "full"}, 0.1, 0.2))))
    train(job, {}, World.single("cpu"))
    assert 'plan: recompute = "full" (the fastest of those that were tried)' in capsys.readouterr().out
    assert '#   recompute = "full": 0.2 s a step' in (tmp_path / "run" / "resolved.toml").read_text()


def test_a_plan_that_follows_another_one_has_no_origins_of_it(make_job):
    """As when the fastest of those that were tried is written to resolved.toml."""
    given = settle(replace(make_job(**GIVEN), plan=Plan(zero=1)), {"plan.zero": "file"}, World.single("cpu"))
    first = under(given, Plan(zero=1, recompute="full", exchange="bf16"), None)
    assert {first.origins[f"plan.{key}"] for key in ("dp", "recompute", "exchange")} == {"planner"}
    later = under(first, Plan(zero=1, recompute="full"), None).origins
    assert "plan.exchange" not in later and later["plan.recompute"] == "planner" and later["plan.zero"] == "file"


@pytest.mark.matrix
def test_the_planner_gives_what_is_tried(quick, make_job, tmp_path):
    steps = 3 * STEPS + 2
    whole = make_job(run={"dir": str(tmp_path / "whole")}, steps=steps, **GIVEN)
    train(whole, {}, World.single("cpu"))
    job = replace(make_job(steps=steps, **GIVEN), auto=Auto(True, 3))
    assert ranks_train(2, job) == [steps] * 2
    assert losses_of(job) == pytest.approx(losses_of(whole), rel=1e-10)
    tried = records_of(job).tried
    assert len({json.dumps(each.plan) for each in tried}) == 3
    assert all(each.seconds > 0 and each.predicted > 0 for each in tried)
    resolved = load_job(tmp_path / "run" / "resolved.toml")[0]
    assert resolved.plan.to_dict() == min(tried, key=lambda each: each.seconds).plan and not resolved.auto.wanted


@pytest.mark.fast
def test_a_plan_under_which_the_run_ends_twice_is_passed_over(tmp_path):
    found = trials()
    assert found.plan == Plan(dp=2) and found.next == 0
    found = found.begun(0).after_the_end(True)
    assert found.next == 1, "the others come first"
    found = found.with_result(1, None, "refused").with_result(2, 3.0)
    assert found.next == 0 and found.begun(0).paused().candidates[0].deaths == 1
    found = found.begun(0).after_the_end(True)
    assert found.next is None and found.plan == Plan(dp=2, zero=1) and "ended 2 times" in str(found.candidates[0])
    assert found.why == "the fastest of those that were tried" and found.begun(2).with_result(2, None, "no").why == (
        "predicted to be the fastest; all that were to be tried were passed over"
    )
    write(tmp_path, found)
    assert read(tmp_path) == found
    (tmp_path / FILE).write_text("{")
    assert read(tmp_path) is None and read(Path("nowhere")) is None


@pytest.mark.parametrize(("failed", "deaths"), [(False, 0), (True, 1)])
def test_a_plan_under_trial_dies_of_ranks_that_fail_and_not_of_a_node_that_is_lost(make_job, tmp_path, failed, deaths):
    """The generation after it is of fewer ranks, which begin trials of their own: it is for that one to know."""
    alone, run_dir = World.single("cpu"), tmp_path / "run"
    settled = settle(replace(make_job(**GIVEN), auto=Auto(True, 3)), {}, alone)
    own = key_of(settled.job, settled.origins, pinned(settled.job, settled.origins), 1)
    asked = of_candidates(own, 2, [(Plan(zero=1), 0.1), (Plan(), 0.1)])
    write(run_dir, asked)
    write(run_dir, trials(now=1))  # of more ranks
    found = planned(settled, alone, failed=failed).trials
    assert found == replace(asked, machine=found.machine) and not any(each.deaths for each in found.candidates)
    more = read(run_dir, "key")
    assert more is not None and more.now is None and [each.deaths for each in more.candidates] == [0, deaths, 0]


@pytest.mark.fast
def test_trials_hold_for_the_same_question():
    def key(
        plan: dict[str, object], ranks: int = 2, pins: Mapping[str, object] = MappingProxyType({}), **train: object
    ) -> str:
        content = {"model": {"name": "gpt"}, "train": {"steps": 1, **train}, "plan": {"name": "auto", **plan}}
        return key_of(*parse_job(content), pins, ranks)

    first = key({"measure": 3})
    assert first == key({"measure": 3}, steps=9), "how long it trains changes nothing"
    others = [
        key({"measure": 3, "allow": ["bf16"]}),
        key({"measure": 3, "allow": ["bytegrad"]}),
        key({"measure": 3, "allow": ["bf16", "bytegrad"]}),
        key({"measure": 2}),
        key({"measure": 3}, ranks=4),
        key({"measure": 3}, pins={"tp": 2}),
        key({"measure": 3}, microbatch=2),
        key({"measure": 3}, lr=0.5),
    ]
    assert len({first, *others}) == 9


def test_trials_hold_for_a_run_that_is_to_train_longer(make_job):
    alone = World.single("cpu")

    def key(**train: object) -> str:
        job = make_job(schedule=None, warmup=None, **train)
        settled = settle(replace(job, auto=Auto(True, 3)), {}, alone)
        return key_of(settled.job, settled.origins, {}, 1)

    assert key(steps=40) == key(steps=400), "warmup follows from the steps"
    assert key(steps=40, lr=1.0) != key(steps=40)


def test_a_plan_that_has_ended_a_rank_is_known_after_a_generation_of_fewer_ranks(make_job, tmp_path):
    """Else it is tried again and again, as the generation of one rank less begins trials of its own."""
    alone = World.single("cpu")
    settled = settle(replace(make_job(**GIVEN), auto=Auto(True, 3)), {}, alone)
    own = key_of(settled.job, settled.origins, pinned(settled.job, settled.origins), 1)
    plans = (Candidate({}, 0.1, 0.2), Candidate({"recompute": "full"}, 0.1), Candidate({"zero": 1}, 0.1))
    write(tmp_path / "run", Trials(own, 2, plans, now=1))  # the rank is killed in the second
    fewer = replace(trials(now=0), key="of fewer ranks")
    for _ in range(2):
        write(tmp_path / "run", fewer)
    assert read(tmp_path / "run") == read(tmp_path / "run", fewer.key) == fewer
    found = planned(settled, alone).trials
    assert found is not None and found.candidates[0].seconds == 0.2 and found.next == 2
    assert found.candidates[1].deaths == 1 and found.plan == Plan(zero=1)
    for number in range(2 * KEPT):
        write(tmp_path / "run", replace(fewer, key=f"another question {number}"))
    assert len(json.loads((tmp_path / "run" / FILE).read_text())["others"]) == KEPT - 1
    assert read(tmp_path / "run", own) is None


def test_what_another_machine_has_measured_does_not_count_here(make_job, tmp_path, monkeypatch):
    alone, run_dir = World.single("cpu"), tmp_path / "run"
    job = make_job(**GIVEN)
    settled = settle(replace(job, auto=Auto(True, 2)), {}, alone)
    own = key_of(settled.job, settled.origins, pinned(settled.job, settled.origins), 1)
    asked = of_candidates(own, 2, [(Plan(zero=1), 0.1), (Plan(), 0.1)])
    monkeypatch.setattr(asking, "answer", lambda *_: [{"zero": 1}, 2, asked.to_wire(), "asked"])
    monkeypatch.setattr(asking, "cluster_of_ranks", lambda *_: None)

    def known(job: Job | None = None) -> Trials | None:
        return planned(settled if job is None else replace(settled, job=job), alone, runs=False).trials

    first = known()
    assert first is not None and first.next == 0
    write(run_dir, first.with_result(0, 0.2))
    resolved = replace(settled.job, auto=Auto())
    for job in (None, resolved):
        assert (here := known(job)) is not None and here.candidates[0].seconds == 0.2
    assert known(replace(resolved, auto=Auto(open=True))) is None, "a job that asks for none, or whose plan was changed"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(automatic, "processor_name", lambda: "another processor")
        there = known()
        assert there is not None and there.next == 0 and known(resolved) is None
        write(run_dir, there.with_result(1, 0.3))
    assert (here := known()) is not None and [each.seconds for each in here.candidates] == [0.2, None]


def test_a_later_generation_goes_on_with_trials_of_a_run_that_began_from_the_checkpoint_of_another(make_job, tmp_path):
    """Until it has a checkpoint of its own, run.resume is that of the other run."""
    alone = World.single("cpu")
    job = make_job(run={"dir": str(tmp_path / "run"), "resume": str(tmp_path / "another")}, **GIVEN)
    settled = settle(replace(job, auto=Auto(True, 2)), {}, alone)
    own = key_of(settled.job, settled.origins, pinned(settled.job, settled.origins), 1)
    known = of_candidates(own, 2, [(Plan(zero=1), 0.1), (Plan(), 0.1)]).with_result(0, 0.2)
    write(tmp_path / "run", known)
    assert planned(settled, alone, failed=False).trials == known


@pytest.mark.fast
def test_what_a_job_may_say():
    base = {"model": {"name": "gpt"}, "train": {"steps": 1}}
    job, origins = parse_job({**base, "plan": {"name": "auto", "measure": 3, "tp": 2}})
    assert job.auto == Auto(True, 3) and job.plan == Plan(tp=2) and pinned(job, origins) == {"tp": 2}
    assert parse_job({**base, "plan": "auto"}, ["plan.measure=2"])[0].auto.measure == 2
    for plan in ({"measure": 3}, {"name": "auto", "measure": -1}, {"name": "auto", "measure": "3"}):
        with pytest.raises(UserError, match="measure"):
            parse_job({**base, "plan": plan})
    allowing = parse_job({**base, "plan": {"name": "auto", "allow": ["bf16", "bytegrad", "bf16"]}})[0]
    assert allowing.auto.allow == ("bf16", "bytegrad") and allowing.plan == Plan()
    for allow, why in (("bf16", "names of exchanges"), (["bf61"], "did you mean bf16|bf16")):
        with pytest.raises(UserError, match=why):
            parse_job({**base, "plan": {"name": "auto", "allow": allow}})
    with pytest.raises(UserError, match=r"plan\.exchange"):
        parse_job({**base, "plan": {"allow": ["bf16"]}})
    with pytest.raises(UserError, match="run\\.at"):
        at = {"at": [{"step": 1, "plan": {"zero": 1}}]}
        parse_job({**base, "plan": {"name": "auto", "measure": 3}, "run": at})

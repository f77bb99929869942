"""A run on several ranks: the same numbers, one decision when to stop, one record."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import replace
from unittest.mock import patch

import pytest

from shoal import checkpoint
from shoal.comm import World
from shoal.elastic.events import END, INTERRUPT
from shoal.errors import CheckpointError, UserError
from shoal.jobs.automatic import pinned
from shoal.jobs.config import Auto, Job, Train
from shoal.jobs.export import export_checkpoint
from shoal.jobs.ranks import ranks_here, spread
from shoal.jobs.read import load_job, parse_job
from shoal.jobs.stop import Stop
from shoal.jobs.train import train
from shoal.plan import Plan
from tests.jobs.conftest import in_cache, losses_of, records_of
from tests.pool import run_ranks


def test_a_run_goes_on_on_another_number_of_ranks(quick, make_job, tmp_path):
    cache = os.environ["XDG_CACHE_HOME"]
    whole = make_job(run={"dir": str(tmp_path / "whole")})
    train(whole, {}, World.single("cpu"))
    assert run_ranks(in_cache, 2, cache, make_job(steps=2)) == [2, 2]
    assert run_ranks(in_cache, 3, cache, make_job(steps=4)) == [4, 4, 4]
    rest = make_job()
    train(rest, {}, World.single("cpu"))
    assert losses_of(rest) == pytest.approx(losses_of(whole), rel=1e-6)
    assert [record.step for record in records_of(rest).steps] == [1, 2, 3, 4, 5, 6], "one rank alone writes"


def with_a_full_disk(world: World, cache: str, job: Job) -> tuple[str, int]:
    """Rank 1's disk has no room for the last checkpoint."""
    written = checkpoint.save.dcp.write_pieces

    def full(path, rank, pieces):
        if rank == 1 and path.name.startswith("step-00000006"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, rank, pieces)

    with patch.object(checkpoint.save.dcp, "write_pieces", full), pytest.raises(CheckpointError) as failure:
        in_cache(world, cache, job)
    return str(failure.value), failure.value.exit_code


def test_all_ranks_end_with_the_error_of_the_one_whose_last_save_failed(make_job, tmp_path):
    first, second = run_ranks(with_a_full_disk, 2, os.environ["XDG_CACHE_HOME"], make_job(run={"save_every": 4}))
    assert first == second and first[1] == 5 and "rank 1 on" in first[0] and "No space left" in first[0]
    assert [row.step for row in checkpoint.listing(tmp_path / "run" / "checkpoints")] == [4]
    assert run_ranks(in_cache, 2, os.environ["XDG_CACHE_HOME"], make_job()) == [6, 6]
    assert [each.step for each in records_of(make_job()).steps] == [1, 2, 3, 4, 5, 6]


def test_a_cut_model_trains_writes_and_goes_on_whole(quick, make_job, tmp_path):
    whole = make_job(run={"dir": str(tmp_path / "whole")})
    train(whole, {}, World.single("cpu"))
    half = replace(make_job(steps=3, run={"sample": "3 + 4"}), plan=Plan(tp=2))
    assert run_ranks(in_cache, 2, os.environ["XDG_CACHE_HOME"], half) == [3, 3]
    parameters = records_of(half).run.parameters
    *_, sampled = records_of(half).terms
    assert sampled.step == 3 and sampled.terms["parts"] > 0 and sampled.sent["parts"] > 0
    rest = make_job()
    train(rest, {}, World.single("cpu"))
    assert losses_of(rest) == pytest.approx(losses_of(whole), rel=1e-6)
    assert parameters == records_of(whole).run.parameters and records_of(rest).samples


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_a_run_without_a_flush_records_every_step_and_goes_on(schedule, quick, make_job, tmp_path):
    """No rank waits for the numbers of a step: they are written later, and all of them."""
    of = {"model": {"layers": 3, "tied": False}, "microbatch": 8 if schedule == "pipedream" else 2, "precision": "fp64"}
    plan = Plan(pp=3, schedule=schedule)
    whole = replace(make_job(run={"dir": str(tmp_path / "whole")}, **of), plan=plan)
    assert run_ranks(in_cache, 3, os.environ["XDG_CACHE_HOME"], whole) == [6] * 3
    assert run_ranks(in_cache, 3, os.environ["XDG_CACHE_HOME"], replace(make_job(steps=3, **of), plan=plan)) == [3] * 3
    rest = replace(make_job(**of), plan=plan)
    assert run_ranks(in_cache, 3, os.environ["XDG_CACHE_HOME"], rest) == [6] * 3
    assert [record.step for record in records_of(rest).steps] == [1, 2, 3, 4, 5, 6]
    assert losses_of(rest) == pytest.approx(losses_of(whole), rel=1e-12)
    terms = records_of(whole).terms
    assert all("bubble" in each.means for each in terms)
    assert any(each.sent.get("stages", 0) > 0 for each in terms), "what goes beside the computing may count later"


@pytest.mark.parametrize("stages", ["measured", {"name": "counted", "memory": "1GiB"}])
def test_stages_are_cut_by_what_they_take_and_written_down(stages, quick, make_job, tmp_path):
    three = {"layers": 3}
    whole = make_job(run={"dir": str(tmp_path / "whole")}, model=three)
    train(whole, {}, World.single("cpu"))
    halves = replace(make_job(model=three), plan=Plan(pp=2, stages=stages))
    assert run_ranks(in_cache, 2, os.environ["XDG_CACHE_HOME"], halves) == [6, 6]
    assert losses_of(halves) == pytest.approx(losses_of(whole), rel=1e-6)
    assert {"bubble", "forward", "backward", "data"} <= set(records_of(halves).terms[-1].means)
    written = load_job(tmp_path / "run" / "resolved.toml")[0].plan.stages
    assert len(written) == 2 and sum(written) == 3
    lacking = replace(make_job(model=three), plan=Plan(pp=2, stages={"name": "counted", "memory": 10}))
    with pytest.raises(Exception, match="no cut into 2 stages leaves each within"):
        run_ranks(in_cache, 2, os.environ["XDG_CACHE_HOME"], lacking)


def test_spread_experts_train_write_and_go_on_together(quick, make_job, tmp_path):
    model = {"moe": {"experts": 4, "capacity_factor": 1.0}}
    whole = make_job(run={"dir": str(tmp_path / "whole")}, model=model)
    train(whole, {}, World.single("cpu"))
    half = replace(make_job(steps=3, run={"sample": "3 + 4"}, model=model), plan=Plan(dp=2, ep=2))
    assert run_ranks(in_cache, 2, os.environ["XDG_CACHE_HOME"], half) == [3, 3]
    assert export_checkpoint(tmp_path / "run", tmp_path / "weights").is_dir()
    assert records_of(half).samples and records_of(half).run.parameters == records_of(whole).run.parameters
    assert records_of(half).terms[0].means["experts"] > 0
    train(make_job(model=model), {}, World.single("cpu"))
    assert losses_of(make_job(model=model)) == pytest.approx(losses_of(whole), rel=1e-6)
    for step in records_of(whole).steps:
        assert len(step.tokens_per_expert) == 1 and len(step.tokens_per_expert[0]) == 4
        assert 0 < step.dropped < 1 <= step.imbalance


def test_the_timeline_has_every_rank(make_job, tmp_path):
    run_ranks(in_cache, 2, os.environ["XDG_CACHE_HOME"], make_job())
    spans = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    assert {(span["rank"], span["lane"]) for span in spans} >= {
        (0, "compute"),
        (1, "compute"),
        (0, "comm"),
        (1, "comm"),
    }
    assert {span["lane"] for span in spans} <= {"compute", "comm", "wait", "queue"}
    records = records_of(make_job())
    assert [each.step for each in records.terms] == [3, 4, 5, 6] and records.run.threads
    for each in records.terms:
        assert sum(each.terms.values()) == pytest.approx(each.seconds, rel=1e-6) and each.world == 2
        assert {"forward", "backward", "optimizer", "copies", "data"} <= set(each.means)
        assert each.sent["copies"] > 0 and {row["what"] for row in each.calls} >= {"copies"}


def stop_of(world: World, who: int, seconds: float | None, aside: bool) -> tuple[int, str | None, int | None]:
    group = world.group("stop", world.everyone.ranks) if aside else world.everyone
    with Stop(group, seconds, aside) as stop:
        for step in range(1, 10_000):
            time.sleep(0.001 * (1 + world.rank))  # ranks of different pace
            if step == 5 and world.rank == who:
                os.kill(os.getpid(), signal.SIGTERM)
            if reason := stop.after_step():
                return step, reason, stop.signal
    return step, None, None


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(who, aside):
    first, second = run_ranks(stop_of, 2, who, None, aside)
    assert first == second
    assert first[1:] == ("stopped by SIGTERM", signal.SIGTERM)


@pytest.mark.parametrize(("how", "number"), [(END, signal.SIGTERM), (INTERRUPT, signal.SIGINT)])
def test_where_nodes_come_and_go_a_signal_to_a_rank_is_left_to_its_supervisor(how, number):
    """A notice may reach all processes of a node: the ranks would end the run of all nodes, and with exit code 0."""
    with Stop(World.single("cpu").everyone, None, heeds=False) as stop:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), each)
            assert not stop.is_due and stop.after_step() is None
        stop.ask(how)
        assert (stop.is_due, stop.after_step(), stop.signal) == (
            True,
            f"stopped by {signal.Signals(number).name}",
            number,
        )


@pytest.mark.parametrize("aside", [False, True])
def test_the_time_limit_stops_all_at_the_same_step(aside):
    first, second = run_ranks(stop_of, 2, -1, 0.3, aside)
    assert first == second
    assert first[1:] == ("the time limit was reached", None)


@pytest.mark.fast
def test_a_plan_takes_the_ranks_there_are_unless_it_says_others():
    job = Job({"name": "gpt"}, Train(steps=1))
    found, origins = spread(job, {}, 4)
    assert (found.plan.dp, origins["plan.dp"]) == (4, "planner")
    for plan in (Plan(dp=3), Plan()):
        with pytest.raises(UserError, match=r"dp = 2 (or .*)?works here"):
            spread(Job({"name": "gpt"}, Train(steps=1), plan=plan), {"plan.dp": "file"}, 2)
    assert ranks_here(Job({"name": "gpt"}, Train(steps=1), plan=Plan(dp=3))) == 3


@pytest.mark.fast
@pytest.mark.parametrize("given", [{"dp": 2}, {"dp": 1}, {"shares": [3, 1]}, {"shard": 2}, {"tp": 2, "dp": 1}])
def test_what_is_given_beside_auto_leaves_other_degrees_to_the_planner(given):
    job, origins = parse_job({"model": {"name": "gpt"}, "train": {"steps": 1}, "plan": {"name": "auto", **given}})
    found, kept = spread(job, origins, 4)
    assert pinned(found, kept) == pinned(job, origins) == {key: getattr(job.plan, key) for key in given}
    if job.plan.size > 1:
        with pytest.raises(UserError, match=r"the plan needs .* 5 were started"):
            spread(job, origins, 5)


def without_replicas(world: World, cache: str, job: Job) -> int:
    os.environ["XDG_CACHE_HOME"] = cache
    return train(job, {"plan.dp": "file"}, world).step


@pytest.mark.matrix
def test_with_one_replica_given_the_planner_divides_the_model_and_that_trains(quick, make_job, tmp_path):
    job = replace(make_job(steps=2), auto=Auto(True))
    assert run_ranks(without_replicas, 2, os.environ["XDG_CACHE_HOME"], job) == [2, 2]
    plan = load_job(tmp_path / "run" / "resolved.toml")[0].plan
    assert (plan.dp, plan.size) == (1, 2)
    whole = make_job(steps=2, run={"dir": str(tmp_path / "whole")})
    train(whole, {}, World.single("cpu"))
    assert losses_of(job) == pytest.approx(losses_of(whole), rel=1e-5)

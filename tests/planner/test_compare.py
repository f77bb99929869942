"""`shoal plan --compare`: a run's record beside the prediction, and what is learned from it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.compared import show_compared
from shoal.device import CPU, hardware_name
from shoal.errors import UserError
from shoal.jobs import answer, compare
from shoal.jobs.compare import measured_steps
from shoal.jobs.trials import of_candidates
from shoal.jobs.trials import write as write_trials
from shoal.optim.buddy import FOR_BUDDY
from shoal.plan import Plan
from shoal.planner import measure
from shoal.planner.learned import learned
from shoal.planner.search import search
from shoal.planner.task import Found, Task
from shoal.report.changes import ServerRecord
from shoal.report.metrics import read_metrics

SECONDS = (9.0, 2.0, 2.0, 7.0, 2.5, 2.0)
HOST = os.uname().nodename
FIRST = '["token_embedding", "position_embedding"'
SPENT = {"forward": 0.6, "backward": 1.1, "optimizer": 0.01, "data": 0.08, "other": 0.21}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = measure.Rates({"fp32": 1e8}, ((1.0, 0.8),), 1e9, 1e-6, 2.0, 1e9, 0.0, 1.0, measure.time.time())
    monkeypatch.setattr(measure, "rates", lambda *_: rates)
    monkeypatch.setattr(answer, "probe", lambda _, task, __: task)  # whose factors would undo these rates
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)
    (tmp_path / "resolved.toml").write_text(
        '[model]\nname = "gpt"\nlayers = 2\nd_model = 32\nheads = 4\nvocab_size = 257\n'
        f'[data]\nsource = "{tmp_path}/text.txt"\nsequence = 16\nvalidation = 0.0\n'
        "[train]\nsteps = 6\nglobal_batch = 8\nmicrobatch = 8\n[plan]\ndp = 1\n[run]\nnproc = 1\n"
    )
    write(tmp_path, HOST)
    return tmp_path


def terms(step: int, spent: dict[str, float] = SPENT) -> dict[str, Any]:
    """The record of what a step was spent on."""
    of = {
        "kind": "terms",
        "step": step,
        "world": 1,
        "hosts": [HOST],
        "rank": 0,
        "seconds": 2.0,
        "terms": spent,
        "sent": {"copies": 7},
    }
    return {**of, "means": spent, "calls": []}


def append(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in lines))


def write(folder: Path, host: str, **more: Any) -> None:
    run = {"kind": "run", "host": host, "device": hardware_name(CPU) or "CPU", "world": 1, "versions": {}, **more}
    lines: list[dict[str, Any]] = [{**run, "parameters": 1, "peak_flops": 1e9, "config": {}, "total": 6}]
    for step, seconds in enumerate(SECONDS, 1):
        one = {"kind": "step", "step": step, "epoch": 0, "loss": 1.0, "grad_norm": None, "lr": 0.1, "tokens": 128}
        rest = {"tokens_per_second": 1.0, "mfu": None, "memory_bytes": 1, "time": float(step)}
        lines.append({**one, "seconds": seconds, **rest})
        if step > 1:
            lines.append(terms(step))
    lines.append({"kind": "checkpoint", "step": 4, "path": "checkpoints/x", "seconds": 1.0})
    lines.append({"kind": "end", "reason": "done", "seconds": 30.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def shown(run_dir: Path, capsys: Any, keep: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    show_compared(run_dir, keep, True)
    told = json.loads(capsys.readouterr().out)
    return told, {each["what"]: each for each in told["terms"]}


def test_a_run_beside_its_prediction_and_what_is_learned(run_dir: Path, capsys: Any) -> None:
    told, found = shown(run_dir, capsys, keep=False)
    step = found["time of a step"]
    assert told["steps"] == 4 and step["measured"] == 2.0  # without the first step and the one with a checkpoint
    assert step["ratio"] == pytest.approx(2.0 / step["predicted"]) and not 0.9 < step["ratio"] < 1.1
    assert told["sampled"] == 5 and found["time of a step: compute"]["measured"] == pytest.approx(1.7)
    parts = [each["measured"] for what, each in found.items() if what.startswith("time of a step: ")]
    assert sum(parts) == pytest.approx(2.0 + 1.7)  # computing is there as a whole, and as forward and backward
    assert found["sent by a rank: data-parallel communication"]["measured"] == 7
    assert found["tokens or samples a second"]["measured"] == 64
    assert found["total time"]["measured"] == 30.0
    assert found["memory of the fullest rank"]["why"] == "not recorded"
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    last = [line for line in lines if '"step": 6' not in line]
    for kept_lines, why in ((lines[:-1], "it has not ended"), (last, "it ended after 5 of 6 steps")):
        (run_dir / "metrics.jsonl").write_text("".join(kept_lines))
        total = shown(run_dir, capsys, keep=False)[1]["total time"]
        assert (total["measured"], total["why"]) == (None, why)
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    assert learned(CPU, torch.float32, 1, 1, [HOST]) is None
    told, _ = shown(run_dir, capsys)
    assert str(run_dir) in told["learned"] and "left as it was" not in told["learned"]
    kept = learned(CPU, torch.float32, 1, 1, [HOST])
    assert kept is not None and kept.data == pytest.approx(0.01)  # of 8 rows
    assert 0.2 < kept.other < 0.21, "less what is counted"
    trace = {"step": 3, "at": [0.0, 1.0], "budgets": {}, "counts_all": False}
    ranks = [{**trace, "rank": rank, "levels": {"host": {"weights": [4, 9 + rank]}}} for rank in range(2)]
    (run_dir / "memory.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ranks))
    told, found = shown(run_dir, capsys)
    assert found["memory of the fullest rank: state and weights in use"]["measured"] == 10
    ranks[0]["levels"]["host"][FOR_BUDDY] = [90, 90]  # which is another rank's state
    (run_dir / "memory.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ranks))
    _, found = shown(run_dir, capsys)
    assert found["memory of the fullest rank: state and weights in use"]["measured"] == 10
    ratios = {what: each["ratio"] for what, each in found.items() if what.startswith("time of a step")}
    assert len(ratios) == 7 and all(each == pytest.approx(1.0) for each in ratios.values()), ratios
    assert any(str(run_dir) in each for each in told["said"])
    again = learned(CPU, torch.float32, 1, 1, [HOST])
    assert again is not None and again.forward == pytest.approx(kept.forward), "a second look changes nothing"


def test_a_second_look_at_a_run_that_computes_blocks_again_changes_nothing(run_dir: Path, capsys: Any) -> None:
    """What is computed again takes as long as is known of forward, so backward alone is what is left."""
    path, spent = run_dir / "resolved.toml", {**SPENT, "backward": 1.5}
    path.write_text(path.read_text().replace("dp = 1", 'dp = 1\nrecompute = "full"'))
    append(run_dir, *(terms(step, spent) for step in (3, 4, 5, 6)))
    found = []
    for _ in range(2):
        told, of = shown(run_dir, capsys)
        assert "left as it was" not in told["learned"]
        found.append(learned(CPU, torch.float32, 1, 1, [HOST]))
    assert of["time of a step: compute: backward"]["ratio"] == pytest.approx(1.0)
    assert found[1].backward == pytest.approx(found[0].backward) and found[1].forward == pytest.approx(found[0].forward)


def test_what_is_not_plausible_is_left_as_it_was(run_dir: Path, capsys: Any) -> None:
    append(run_dir, *(terms(step, {**SPENT, "backward": 900.0, "other": 1200.0}) for step in (4, 5, 6)))
    told, _ = shown(run_dir, capsys)
    assert "backward took" in told["learned"] and "60000% of a step are in no term" in told["learned"]
    kept = learned(CPU, torch.float32, 1, 1, [HOST])
    assert kept is not None and kept.backward == 1.0 and kept.other == 0.0 and kept.forward != 1.0


@pytest.mark.parametrize(
    ("more", "why"),
    [({"versions": {"torch": "1.0"}}, "the run was of torch 1.0"), ({"threads": 99}, "99 threads each")],
)
def test_runs_under_other_conditions_teach_nothing(more: dict[str, Any], why: str, run_dir: Path, capsys: Any) -> None:
    write(run_dir, HOST, **more)
    assert why in shown(run_dir, capsys)[0]["learned"]
    assert learned(CPU, torch.float32, 1, 1, [HOST]) is None


def test_a_run_with_a_parameter_server_is_not_taken_for_one_of_its_workers_alone(run_dir: Path, capsys: Any) -> None:
    append(run_dir, asdict(ServerRecord(step=6, policy="mean", clients=[], pushes=6, dropped=0, scaled=0, staleness={},
                                        lags={})) | {"kind": "server"})  # fmt: skip
    with pytest.raises(UserError, match="has a parameter server, and predictions are of ranks that train in step"):
        shown(run_dir, capsys)


def test_a_run_that_ended_while_plans_were_tried_says_what_was_measured(run_dir: Path, capsys: Any) -> None:
    append(run_dir, {"kind": "plan", "step": 4, "plan": {"recompute": "full"}, "seconds": 0.1})
    trials = of_candidates("", 8, [(Plan(), 1.5), (Plan(recompute="full"), 1.6)]).with_result(0, 2.0)
    write_trials(run_dir, trials)
    said = 'one rank: 2 s a step, 1.5 s predicted; recompute = "full": not tried'
    with pytest.raises(UserError, match=f"ended while plans were tried.*{said}"):
        shown(run_dir, capsys)
    write_trials(run_dir, trials.with_result(1, 2.1))
    with pytest.raises(UserError, match="its plan was changed"):
        shown(run_dir, capsys)


def test_a_run_whose_plans_were_tried_is_compared_under_the_one_that_stayed(run_dir: Path, capsys: Any) -> None:
    def changed(step: int, plan: dict[str, Any]) -> None:
        append(run_dir, {"kind": "plan", "step": step, "plan": plan, "seconds": 0.1})

    changed(1, {"recompute": "full"})
    with pytest.raises(UserError, match="its plan was changed"):
        show_compared(run_dir, False, True)
    changed(3, {})
    records = read_metrics(run_dir / "metrics.jsonl")
    assert measured_steps(records) == [2.5, 2.0], "neither those of other plans, nor the first of this one"
    told, _ = shown(run_dir, capsys)
    assert told["sampled"] == 2 and "of 2 steps is known" in told["learned"]


def again(folder: Path, first: int, seconds: float, *config: tuple[str, Any], last: int = 6) -> None:
    """Appends an attempt that trains the steps from `first` on, under such values of the job."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run = {**lines[0], "config": {key: {"value": value, "origin": "file"} for key, value in config}}
    steps = [{**lines[1], "step": step, "seconds": seconds, "time": 100.0 + step} for step in range(first, last + 1)]
    append(folder, run, *steps, *(terms(step) for step in range(first + 1, last + 1)))


def test_attempts_under_another_plan_or_batch_do_not_count(run_dir: Path, capsys: Any) -> None:
    again(run_dir, 4, 3.0, ("plan.zero", 0))  # the first attempt had no such value
    told, found = shown(run_dir, capsys)
    assert found["time of a step"]["measured"] == 3.0 and (told["steps"], told["sampled"]) == (2, 2)
    assert "of 2 steps is known" in told["learned"] and found["total time"]["why"] == "of several attempts or plans"
    again(run_dir, 6, 4.0, ("plan.zero", 0), ("train.lr", 0.5))  # a learning rate takes no time
    told, found = shown(run_dir, capsys, keep=False)
    assert (found["time of a step"]["measured"], told["steps"]) == (3.0, 1)
    again(run_dir, 6, 5.0, ("plan.zero", 0), ("train.global_batch", 4), last=8)
    _, found = shown(run_dir, capsys, keep=False)
    assert found["time of a step"]["measured"] == 5.0
    again(run_dir, 9, 5.0, ("plan.zero", 3), last=8)  # it was begun, and has trained nothing yet
    with pytest.raises(UserError, match="no step to compare"):
        show_compared(run_dir, False, True)


def test_steps_that_loss_scaling_skipped_do_not_count(run_dir: Path, capsys: Any) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    append(run_dir, *({**each, "skipped": True} for each in lines if each.get("step") in (2, 3) and "loss" in each))
    told, found = shown(run_dir, capsys, keep=False)
    assert (found["time of a step"]["measured"], told["steps"], told["sampled"]) == (2.25, 2, 3)


def test_an_attempt_under_the_plan_of_the_file_counts_after_one_that_was_replanned(run_dir: Path, capsys: Any) -> None:
    append(run_dir, {"kind": "plan", "step": 2, "plan": {"recompute": "full"}, "seconds": 0.1})
    held = {"step": 3, "rank": 0, "at": [3.0], "budgets": {}, "counts_all": False}
    (run_dir / "memory.jsonl").write_text(json.dumps({**held, "levels": {"host": {"weights": [999]}}}) + "\n")
    again(run_dir, 4, 3.0)
    told, found = shown(run_dir, capsys)
    assert (found["time of a step"]["measured"], told["steps"], told["sampled"]) == (3.0, 2, 2)
    assert found["memory of the fullest rank"]["why"] == "not recorded", "that was the other plan's"


def test_of_an_elastic_run_the_last_generation_counts(run_dir: Path, capsys: Any) -> None:
    of = {"kind": "membership", "nodes": 1, "lost": 0, "why": "", "events": []}
    append(run_dir, {**of, "step": 0, "generation": 1, "world": 2},
           {"kind": "plan", "step": 2, "plan": {"dp": 2, "zero": 1}, "seconds": 0.1},
           {**of, "step": 3, "generation": 2, "world": 1})  # fmt: skip
    told, _ = shown(run_dir, capsys)
    assert (told["steps"], told["sampled"]) == (2, 2)
    append(run_dir, {**of, "step": 6, "generation": 3, "world": 1})  # others have come, and nothing was left to train
    assert shown(run_dir, capsys)[0]["steps"] == 2


def test_what_is_learned_is_of_the_ranks_that_a_host_had(run_dir: Path, capsys: Any) -> None:
    """Not of run.nproc, which is the first node's: one that joined, and is left alone, has another number."""
    resolved = run_dir / "resolved.toml"
    resolved.write_text(resolved.read_text().replace("dp = 1", "dp = 2"))
    for more, on_host in (({"on_host": 2}, 2), ({}, 1)):
        write(run_dir, HOST, **{**more, "world": 2})
        shown(run_dir, capsys)
        kept = learned(CPU, torch.float32, 2, on_host, [HOST])
        assert kept is not None and (learned(CPU, torch.float32, 2, 1, [HOST]) is None) == (on_host == 2)


def test_of_an_elastic_run_that_went_back_the_last_generation_counts(run_dir: Path, capsys: Any) -> None:
    of = {"kind": "membership", "nodes": 1, "lost": 0, "why": "", "events": [], "world": 1}
    append(run_dir, {**of, "step": 0, "generation": 1}, {**of, "step": 20, "generation": 2})
    again(run_dir, 3, 3.0, last=6)
    append(run_dir, {**of, "step": 2, "lost": 18, "generation": 3})
    told, found = shown(run_dir, capsys)
    assert (found["time of a step"]["measured"], told["steps"], told["sampled"]) == (3.0, 3, 3)


@pytest.mark.parametrize(
    ("stages", "numbers"),
    [
        ("", [3, 1]),  # by elements of matrices: the head is as many as five blocks have
        (f'stages = [{FIRST}, "blocks.0"], ["blocks.1", "blocks.2", "blocks.3", "norm", "head"]]', [1, 3]),
        (f'stages = [{FIRST}, "blocks"], ["norm", "head"]]', None),
    ],
    ids=["as the engine cuts", "by names", "not between blocks"],
)
def test_a_pipeline_is_compared_in_the_stages_that_ran(
    stages: str, numbers: list[int] | None, run_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = run_dir / "resolved.toml"
    text = resolved.read_text().replace("layers = 2", "layers = 4").replace("= 257", "= 2000")
    resolved.write_text(
        text.replace("dp = 1", f'pp = 2\nschedule = "zb1p"\n{stages}').replace("nproc = 1", "nproc = 2")
    )
    write(run_dir, HOST, world=2, on_host=2)
    levels = {role: [1] for role in ("weights", "gradients", "optimizer state")}
    trace = {"step": 3, "at": [3.0], "budgets": {}, "counts_all": False, "levels": {"host": levels}}
    (run_dir / "memory.jsonl").write_text("".join(json.dumps({**trace, "rank": rank}) + "\n" for rank in range(2)))
    tasks: list[Task] = []
    monkeypatch.setattr(compare, "search", lambda task: tasks.append(task) or search(task))
    told, found = shown(run_dir, capsys, keep=False)
    assert tasks[0].pins["stages"] == numbers
    assert any("stages of whole blocks" in each for each in told["said"]) == (numbers is None)
    if numbers == [3, 1]:  # the first has more state, the last more in all, with its logits
        block = 12 * 32 * 32 + 9 * 32 + 4 * 32
        state = 16 * (2000 * 32 + 16 * 32 + 3 * block)
        assert found["memory of the fullest rank: state and weights in use"]["predicted"] == pytest.approx(state, 1e-2)


@pytest.mark.parametrize(("plan", "batch", "each"), [("dp = 1", 100, (100, 1)), ("pp = 2", 64, (8, 8))])
def test_a_microbatch_that_the_job_left_open_is_that_of_its_engine(
    plan: str, batch: int, each: tuple[int, int], run_dir: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was what the planner would take: what was learned was of other microbatches than those that ran."""
    resolved, ranks = run_dir / "resolved.toml", 1 + (plan != "dp = 1")
    text = resolved.read_text().replace("microbatch = 8\n", "").replace("global_batch = 8", f"global_batch = {batch}")
    resolved.write_text(text.replace("dp = 1", plan).replace("nproc = 1", f"nproc = {ranks}"))
    write(run_dir, HOST, world=ranks, on_host=ranks)
    found: list[Found] = []
    monkeypatch.setattr(compare, "search", lambda task: found.append(search(task)) or found[-1])
    shown(run_dir, capsys, keep=False)
    assert (found[0].best[0].choice.microbatch, found[0].best[0].microbatches) == each


def test_a_schedule_of_a_file_is_not_predicted(run_dir: Path) -> None:
    resolved = run_dir / "resolved.toml"
    resolved.write_text(resolved.read_text().replace("dp = 1", 'pp = 2\nschedule = {name = "file", path = "mine.txt"}'))
    write(run_dir, HOST, world=2, on_host=2)
    with pytest.raises(UserError, match="its schedule is of a file, of which nothing is predicted"):
        show_compared(run_dir, False, False)


def test_what_is_no_run_of_this_machine(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the directory of a run"):
        show_compared(tmp_path / "cache", True, False)
    write(run_dir, "elsewhere")
    with pytest.raises(UserError, match="elsewhere"):
        show_compared(run_dir, True, False)

"""`shoal plan --compare`: a run's record beside the prediction, and what is learned from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.compared import show_compared
from shoal.device import CPU, hardware_name
from shoal.errors import UserError
from shoal.jobs.compare import measured_steps
from shoal.planner import measure
from shoal.report.metrics import read_metrics

SECONDS = (9.0, 2.0, 2.0, 7.0, 2.5, 2.0)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = measure.Rates(1e9, 1e9, 1e-6, measure.time.time())
    monkeypatch.setattr(measure, "rates", lambda *_: rates)
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)
    (tmp_path / "resolved.toml").write_text(
        '[model]\nname = "gpt"\nlayers = 2\nd_model = 32\nheads = 4\nvocab_size = 257\n'
        f'[data]\nsource = "{tmp_path}/text.txt"\nsequence = 16\nvalidation = 0.0\n'
        "[train]\nsteps = 6\nglobal_batch = 8\nmicrobatch = 8\n[plan]\ndp = 1\n[run]\nnproc = 1\n"
    )
    write(tmp_path, os.uname().nodename)
    return tmp_path


def write(folder: Path, host: str) -> None:
    run = {"kind": "run", "host": host, "device": hardware_name(CPU) or "CPU", "world": 1, "versions": {}}
    lines: list[dict[str, Any]] = [{**run, "parameters": 1, "peak_flops": 1e9, "config": {}, "total": 6}]
    for step, seconds in enumerate(SECONDS, 1):
        one = {"kind": "step", "step": step, "epoch": 0, "loss": 1.0, "grad_norm": None, "lr": 0.1, "tokens": 128}
        rest = {"tokens_per_second": 1.0, "mfu": None, "memory_bytes": 1, "time": float(step)}
        lines.append({**one, "seconds": seconds, **rest})
    lines.append({"kind": "checkpoint", "step": 4, "path": "checkpoints/x", "seconds": 1.0})
    lines.append({"kind": "end", "reason": "done", "seconds": 30.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def shown(run_dir: Path, capsys: Any, keep: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    show_compared(run_dir, keep, True)
    told = json.loads(capsys.readouterr().out)
    return told, {each["what"]: each for each in told["terms"]}


def test_a_run_beside_its_prediction_and_what_is_learned(run_dir: Path, capsys: Any) -> None:
    told, terms = shown(run_dir, capsys, keep=False)
    step = terms["time of a step"]
    assert told["steps"] == 4 and step["measured"] == 2.0  # without the first step and the one with a checkpoint
    assert step["ratio"] == pytest.approx(2.0 / step["predicted"]) and step["ratio"] > 1.1
    assert terms["tokens or samples a second"]["measured"] == 64
    assert terms["total time"]["measured"] == 30.0
    assert terms["memory of the fullest rank"]["why"] == "not recorded"
    assert measure.learned(CPU, torch.float32, 1) is None
    told, _ = shown(run_dir, capsys)
    assert str(run_dir) in told["learned"]
    trace = {"step": 3, "at": [0.0, 1.0], "budgets": {}, "counts_all": False}
    ranks = [{**trace, "rank": rank, "levels": {"host": {"weights": [4, 9 + rank]}}} for rank in range(2)]
    (run_dir / "memory.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ranks))
    told, terms = shown(run_dir, capsys, keep=False)
    assert terms["memory of the fullest rank: state and weights in use"]["measured"] == 10
    assert terms["time of a step"]["ratio"] == pytest.approx(1.0)
    assert any(str(run_dir) in each for each in told["said"])


def test_a_run_whose_plans_were_tried_is_compared_under_the_one_that_stayed(run_dir: Path) -> None:
    def changed(step: int, plan: dict[str, Any]) -> None:
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "plan", "step": step, "plan": plan, "seconds": 0.1}) + "\n")

    changed(1, {"recompute": "full"})
    with pytest.raises(UserError, match="its plan or ranks changed"):
        show_compared(run_dir, False, True)
    changed(3, {})
    records = read_metrics(run_dir / "metrics.jsonl")
    assert measured_steps(records) == [2.5, 2.0], "neither those of other plans, nor the first of this one"
    show_compared(run_dir, False, True)


def test_what_is_no_run_of_this_machine(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the directory of a run"):
        show_compared(tmp_path / "cache", True, False)
    write(run_dir, "elsewhere")
    with pytest.raises(UserError, match="elsewhere"):
        show_compared(run_dir, True, False)

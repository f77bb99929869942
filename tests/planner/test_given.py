"""What a job, its run and `--pin` give a question about another machine."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.answer import Options, answer_for
from shoal.errors import UserError
from shoal.jobs.read import load_job
from shoal.jobs.write import write_resolved
from shoal.plan import Plan


def tiny(directory: Path, train: str = "steps = 4\n") -> Path:
    """A job of a small GPT on a little text."""
    (directory / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)
    job = directory / "job.toml"
    job.write_text(
        '[model]\nname = "gpt"\nlayers = 4\nd_model = 32\nheads = 4\n'
        f'[data]\nsource = "{directory}/text.txt"\nsequence = 16\nvalidation = 0.0\n[train]\n{train}'
    )
    return job


def test_what_a_run_chose_is_chosen_anew_for_another_machine(tmp_path: Path, capsys: Any) -> None:
    """The microbatch stayed the one of the run, and the refusal of its plan did not say what asks for another."""
    job, origins = load_job(tiny(tmp_path))
    chosen = replace(job, plan=Plan(dp=2), train=replace(job.train, microbatch=1))
    (tmp_path / "run").mkdir()
    resolved = tmp_path / "run" / "resolved.toml"
    write_resolved(chosen, {**origins, "plan.dp": "planner", "train.microbatch": "planner"}, tmp_path / "run")
    with pytest.raises(UserError, match=r"or leave all that .plan. gives to the planner: --set plan=auto$"):
        answer_for(resolved, [], Options("8xh100"), True, None)
    answers = []
    for path, more in ((resolved, ["plan=auto"]), (tmp_path / "job.toml", [])):
        answer_for(path, more, Options("8xh100"), True, None)
        told = json.loads(capsys.readouterr().out)
        answers.append({key: told[key] for key in ("plan", "microbatch", "seconds")})
    assert answers[0] == answers[1] and answers[0]["microbatch"] > 1
    assert load_job(resolved)[0].train.microbatch == 1, "trained again it is as it was"
    given = resolved.read_text().replace("microbatch = 1  # planner", "microbatch = 1  # file")
    resolved.write_text(given)
    assert load_job(resolved, ["plan=auto"])[0].train.microbatch == 1, "who gave one keeps it"


def test_a_field_has_one_value(tmp_path: Path, capsys: Any) -> None:
    """Of a pin and of what the job gives the pin was taken, silently."""
    job = tiny(tmp_path)
    job.write_text(f"{job.read_text()}[plan]\ntp = 2\n")
    with pytest.raises(UserError, match=r"--pin tp = 4 and tp = 2 of the job are two values: give one, or leave all"):
        answer_for(job, [], Options("8xh100", ["tp=4"]), True, None)
    answer_for(job, [], Options("8xh100", ["tp=2"]), True, None)
    assert json.loads(capsys.readouterr().out)["plan"]["tp"] == 2
    job.write_text(f'{job.read_text()}shares = [1, 3]\nschedule = "zb1p"\n')
    same = ["shares=[1,3]", 'schedule={name = "zb1p"}', "pp=1"]
    answer_for(job, ["plan.dp=2"], Options("4xh100", same), True, None)
    assert json.loads(capsys.readouterr().out)["plan"]["dp"] == 2, "however it is spelled"
    answer_for(job, ["plan=auto"], Options("8xh100", ["tp=4", "cp=1", "context=ring"]), True, None)
    told = json.loads(capsys.readouterr().out)["plan"]
    assert (told["tp"], told["context"]) == (4, "ring"), "it was said to be ulysses"


@pytest.mark.parametrize(("precision", "before", "low", "high"), [("tf32", "fp32", 3, 8), ("fp8", "bf16", 1.2, 2.0)])
def test_products_of_rounded_factors_have_their_own_rate(
    precision: str, before: str, low: float, high: float, tmp_path: Path, capsys: Any
) -> None:
    """They took as long as those of the format that they are stored in."""
    job = tiny(tmp_path, "steps = 4\nglobal_batch = 64\n")
    wide = ["model.d_model=4096", "model.heads=32", "data.sequence=1024"]
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "text.txt").write_text(text * 100)
    taken = {}
    for name, machine in product((precision, before), ("1xh100", "1x910b")):
        answer_for(job, [*wide, f"train.precision={name}"], Options(machine, ["memory=none"]), True, None)
        told = json.loads(capsys.readouterr().out)
        taken[name, machine] = told["terms"]["compute"]
        said = any(f"no rate of 910b in {precision} is known" in each for each in told["cluster"]["said"])
        assert said == (machine == "1x910b" and name == precision)
    assert low < taken[before, "1xh100"] / taken[precision, "1xh100"] < high
    assert taken[before, "1x910b"] == taken[precision, "1x910b"]

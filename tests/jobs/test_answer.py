"""The table that `shoal plan` prints trains as it is: uneven shares, and blocks that are computed again."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.answer import Options, answer_for
from shoal.comm import World
from shoal.jobs.read import load_job
from shoal.plan import Plan
from tests.jobs.conftest import in_cache
from tests.pool import run_ranks

JOB = """
[model]
name = "gpt"
layers = 6
d_model = 32
heads = 2
vocab_size = 257
[data]
source = "{corpus}"
sequence = 32
validation = 0.2
[run]
dir = "{run_dir}"
trackers = []
[train]
steps = 2
global_batch = 16
precision = "bf16"
"""
UNLIKE = """
[[hosts]]
device = "h100"
count = 1
memory = "1MB"  # so nothing goes there
[[hosts]]
device = "h100"
count = 1
flops = { bf16 = 3e14 }
bandwidth = 1e12
launch = 1.5e-5  # of which the time of a small model consists
"""


def trained(world: World, cache: str, path: Path) -> tuple[int, Any]:
    job, _ = load_job(path)
    return in_cache(world, cache, job), job.plan


def as_printed(job: Path, given: Options, capsys: pytest.CaptureFixture[str]) -> tuple[Plan, str]:
    """The plan under which two ranks train the job with what is printed for it, and all that is printed."""
    answer_for(job, [], given, False, None)
    printed = capsys.readouterr().out
    table = printed[printed.index("[plan]") : printed.index("\na step")]
    plan, own = table.split("[train]\n")
    job.write_text(f"{job.read_text()}{own.strip()}\n{plan}")
    (step, chosen), _ = run_ranks(trained, 2, os.environ["XDG_CACHE_HOME"], job)
    assert step == 2 and chosen.size == 2
    return chosen, printed


@pytest.mark.parametrize(
    "pins", [["dp=2", "zero=1"], pytest.param(["pp=2", "schedule=interleaved"], marks=pytest.mark.matrix)], ids=str
)
def test_what_is_printed_trains_as_it_is(pins, corpus, tmp_path, capsys):
    job, machine = tmp_path / "job.toml", tmp_path / "two.toml"
    job.write_text(JOB.format(corpus=corpus, run_dir=tmp_path / "run"))
    machine.write_text(UNLIKE)
    given = Options(str(machine), pins, None, "2MB" if "dp=2" in pins else "1.6MB")
    chosen, printed = as_printed(job, given, capsys)
    assert chosen.recompute["name"] == "blocks" and "all computed again" in printed
    assert re.search(r"[+-]\d+\.\d%: ", printed), "why not the others, also in 80 columns"
    assert chosen.shares == ((3, 1) if "dp=2" in pins else ())
    answer_for(job, [], Options(str(machine), device=given.device), True, None)
    told = json.loads(capsys.readouterr().out)
    assert told["plan"] == json.loads(json.dumps(chosen.to_dict())), "what is given is priced as it is given"
    assert told["shares"] == list(chosen.shares) and len(told["recompute_by_stage"]) == len(chosen.stages or [6])


def test_a_budget_of_memory_that_is_printed_trains_as_it_is(corpus, tmp_path, capsys):
    job, machine = tmp_path / "job.toml", tmp_path / "two.toml"
    job.write_text(JOB.format(corpus=corpus, run_dir=tmp_path / "run"))
    machine.write_text(f'[[hosts]]\ndevice = "h100"\ncount = 2\nmemory = "2500KiB"\nscratch = "{tmp_path}/pages"\n')
    chosen, printed = as_printed(job, Options(str(machine), ["dp=2", "zero=0"], device="1.2MB"), capsys)
    assert chosen.memory == {"device": "1171KiB", "host": "1000KiB", "disk": f"{tmp_path}/pages"}
    assert "at home on the host" in printed and "at home on the disk" in printed and "needs at least" in printed
    assert any((tmp_path / "pages").iterdir()), "the pages lie there"

"""The table that `shoal plan` prints trains as it is: uneven shares, and blocks that are computed again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.answer import answer_for
from shoal.comm import World
from shoal.jobs.read import load_job
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
[[hosts]]
device = "h100"
count = 1
flops = { bf16 = 3e14 }
"""


def trained(world: World, cache: str, path: Path) -> tuple[int, Any]:
    job, _ = load_job(path)
    return in_cache(world, cache, job), job.plan


@pytest.mark.parametrize(
    "pins", [["dp=2", "zero=1"], pytest.param(["pp=2", "schedule=interleaved"], marks=pytest.mark.matrix)], ids=str
)
def test_what_is_printed_trains_as_it_is(pins, corpus, tmp_path, capsys):
    job, machine = tmp_path / "job.toml", tmp_path / "two.toml"
    text = JOB.format(corpus=corpus, run_dir=tmp_path / "run")
    job.write_text(text)
    machine.write_text(UNLIKE)
    given = (str(machine), pins, None, "2MB" if "dp=2" in pins else "1.6MB")
    answer_for(job, [], given, False, None)
    printed = capsys.readouterr().out
    table = printed[printed.index("[plan]") : printed.index("\na step")]
    plan, own = table.split("[train]\n")
    job.write_text(f"{text}{own.strip()}\n{plan}")
    cache = os.environ["XDG_CACHE_HOME"]
    (step, chosen), _ = run_ranks(trained, 2, cache, job)
    assert step == 2 and chosen.size == 2
    assert chosen.recompute["name"] == "blocks" and "all computed again" in printed
    assert chosen.shares == ((3, 1) if "dp=2" in pins else ())
    answer_for(job, [], (str(machine), [], None, given[3]), True, None)
    told = json.loads(capsys.readouterr().out)
    assert told["plan"] == json.loads(json.dumps(chosen.to_dict())), "what is given is priced as it is given"
    assert told["shares"] == list(chosen.shares) and len(told["recompute_by_stage"]) == len(chosen.stages or [6])

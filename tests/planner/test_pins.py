"""Values that no plan can have are refused where they are pinned, as the engine would refuse them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import auto_plan
from shoal.cli.answer import Options, answer_for
from shoal.comm import World
from shoal.errors import UserError
from shoal.jobs import asking
from shoal.jobs.choose import opened
from shoal.jobs.read import parse_job
from shoal.planner.pins import check_pins
from tests.planner.models import cluster

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tpp": 2}, 'plan has no field "tpp". Did you mean "tp"?'),
    ({"tp": 0}, "plan.tp = 0: a degree is a whole number of at least 1"),
    ({"zero": 5}, "is not one of 0, 1, 2, 3"),
    ({"context": "rings"}, "is not one of 'ulysses', 'ring'"),
    ({"recompute": "ful"}, 'plan.recompute = "ful" is not one of none, full,'),
    ({"recompute": {"name": "budget"}}, '"budget" needs the parameter "keep"'),
    ({"recompute": {"name": "selective", "save": ["matmuls"]}}, "plan.recompute: save = ['matmuls']"),
    ({"recompute": {"name": "blocks", "full": "0-", "selective": 2}}, "plan.recompute: full = '0-'"),
    ({"schedule": "1f2b"}, 'plan.schedule = "1f2b" is none of gpipe'),
    ({"schedule": {"name": "zbv", "chunks": 3}}, "takes 2 chunks a rank, not 3"),
    ({"schedule": {"name": "interleaved", "chunks": "2"}}, "chunks = '2': give the number of stages of a rank"),
    ({"schedule": {"name": "file", "path": "mine"}}, "leaves nothing to search for"),
    ({"exchange": "bf61"}, 'plan.exchange = "bf61" is not implemented. Did you mean "bf16"?'),
    ({"memory": {"devise": "1GiB"}}, 'plan.memory has no key "devise". Did you mean "device"?'),
    ({"memory": {"device": "much"}}, "plan.memory.device = 'much': give bytes"),
    ({"placements": {"**.up": "colum"}}, "plan.placements['**.up'] = 'colum' is none of column"),
    ({"stages": [4, 4]}, "by --pin pp=2"),
    ({"pp": 2, "stages": "counted"}, 'plan.stages = "counted": the planner cuts stages itself'),
    ({"dp": 4, "shard": 3}, "plan.shard = 3: that many of dp = 4 ranks share one copy of the state"),
    ({"dp": 2, "shares": [1, 2, 3]}, "are 3 numbers, and dp = 2 ranks share"),
    ({"shares": [-1, 2]}, "plan.shares = [-1, 2]: give each of the dp ranks a number from 0 on"),
    ({"buddy": "often"}, "plan.buddy = 'often': give the number of steps"),
]


@pytest.mark.parametrize(("pins", "said"), WRONG, ids=[str(pins) for pins, _ in WRONG])
def test_what_no_plan_can_have_is_refused(pins: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        check_pins(pins)


def test_what_a_plan_can_have_is_left_to_the_search() -> None:
    for pins in (
        {"tp": 2, "pp": 2, "stages": [3, 5], "schedule": {"name": "interleaved", "chunks": 4}},
        {"dp": 4, "shard": 2, "shares": [3, 1, 1, 1]},
        {"shard": 2, "shares": [3, 1], "ep": 8, "cp": 2, "context": "ring"},
        {"recompute": {"name": "blocks", "full": "0-11, 40", "selective": 8}, "memory": None, "placements": None},
        {"recompute": {"name": "blocks", "every": 2}, "schedule": "2bw", "memory": "auto", "exchange": "bytegrad"},
        {"placements": {"lm_head": "whole"}, "zero": 0, "memory": {"device": "2GiB", "disk": "/scratch"}},
        {"compile": True, "stages": None},
    ):
        check_pins(pins)


def test_a_backend_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match=r'plan.compile = .inducter. is no backend.*Did you mean "inductor"'):
        check_pins({"compile": "inducter"})


def test_nothing_is_traced_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shoal plan --on`, `plan = "auto"` of a job and `auto_plan` ask alike; models and data are not even there."""
    said = r'plan.recompute = "ful" is not one of .* Did you mean "full"'
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "gpt"\npreset = "1m"\n[data]\nsource = "none"\n[train]\nsteps = 1\n'
    )
    with pytest.raises(UserError, match=said):
        answer_for(tmp_path / "job.toml", [], Options("8xh100", ["recompute=ful"]), True, None)
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)
    data = {"source": str(tmp_path / "text.txt"), "sequence": 16, "validation": 0.0}
    content = {"model": {"name": "gpt", "preset": "1m"}, "data": data, "train": {"steps": 1}}
    settled = opened(*parse_job({**content, "plan": {"name": "auto", "recompute": "ful"}}))
    monkeypatch.setattr(asking, "task_here", lambda *_: pytest.fail("it is traced"))
    with pytest.raises(UserError, match=said):
        asking.answer(settled, cluster(), True)
    sgd, row = partial(torch.optim.SGD, lr=0.1), {"inputs": torch.zeros(2)}
    with pytest.raises(UserError, match=said):
        auto_plan(
            lambda: pytest.fail("it is made"),
            lambda *_: pytest.fail("it is run"),
            sgd,
            row,
            global_batch=8,
            pins={"recompute": "ful"},
            world=World.single("cpu"),
            cluster=cluster(),
        )

"""Whole runs under faults, held against the same run without them: `shoal chaos` as anybody would call it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.report.follow import Follower
from shoal.report.metrics import MembershipRecord

JOB = """
[model]
name = "gpt"
layers = 2
d_model = 16
heads = 2
[data]
source = "corpus"
sequence = 16
validation = 0.2
[train]
global_batch = 12
microbatch = 2
lr = 1e-3
optimizer = {name = "sgd", momentum = 0.9}
schedule = "constant"
warmup = 0
"""
FAULTS = {
    "ranks": "kill,stop,slow,disk,two",
    "nodes": "drain,node,coordinator,drop,hangup",
    "moments": "save,rejoin",
    "bits": "weight,optimizer,gradient",
}


@dataclass(frozen=True)
class Row:
    """A plan, under `nodes` nodes of `nproc` ranks. `voted`: replicas can tell each other that a bit has flipped."""

    sets: tuple[str, ...] = ()
    nodes: int = 3
    nproc: int = 1
    voted: bool = True
    tolerance: float = 1e-5


PLANS = {
    "dp": Row(),
    "zero1": Row(("plan.zero=1",), voted=False),  # weights in the memory of all, and of the state there is one copy
    "zero2": Row(("plan.zero=2",), voted=False),
    "zero3": Row(("plan.zero=3",), voted=False),
    "buddies": Row(("plan.zero=3", 'plan.buddy="auto"'), voted=False),
    "tp": Row(("plan.tp=2",), nproc=2),
    "pp": Row(("plan.pp=2",), nproc=2),
    "ep": Row(("plan.ep=2", "model.moe={experts = 4, d_ff = 16}"), nproc=2),
    "offload": Row(("plan.memory={}",)),
    # its replicas differ on purpose: steps and samples are the same, losses only nearly, once ranks have come and gone
    "decentralized": Row(('plan.exchange="decentralized"',), voted=False, tolerance=0.2),
}


def chaos(folder: Path, faults: str, row: Row, steps: int, *more: str) -> dict[str, Any]:
    """Performs the faults; returns what came of it, as JSON has it."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(20):
        text = "\n".join(f"{number} + {i} = {number + i}" for i in range(40))
        (corpus / f"{number:02}.txt").write_text(text)
    (folder / "job.toml").write_text(JOB)
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    sets = [f"--set={each}" for each in (f"train.steps={steps}", *row.sets)]
    command = [sys.executable, "-m", "shoal.cli", "chaos", "job.toml", f"--faults={faults}", "--json", "--dir=out"]
    size = [f"--nodes=1:{row.nodes}", f"--nproc={row.nproc}", f"--tolerance={row.tolerance}"]
    done = subprocess.run([*command, *size, *sets, *more], cwd=folder, env=env, capture_output=True, text=True)
    assert done.stdout, done.stderr
    (folder / "outcome").write_text(f"{done.stderr}\n{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def told_of(metrics: Path) -> list[str]:
    """What has happened to the members of a run, as it says."""
    follower = Follower(metrics)
    follower.read()
    return [event for each in follower.records if isinstance(each, MembershipRecord) for event in each.events]


def failed(outcome: dict[str, Any]) -> list[str]:
    return [f"{each['name']}: {each['text']}" for each in outcome["checks"] if not each["passed"]]


@pytest.mark.matrix
def test_nothing_is_lost_and_the_rank_with_a_flipped_bit_is_named(tmp_path):
    outcome = chaos(tmp_path, "weight", Row(nodes=1, nproc=3), 60, "--pace=0.03")
    assert failed(outcome) == [] and outcome["passed"]
    (row,) = outcome["rows"]
    assert row["noticed"] is not None and row["recovered"] > 0
    told = told_of(tmp_path / "out/faults/run/metrics.jsonl")
    assert any(re.search(r"rank \d holds other bits \(.*weights\) than most ranks", each) for each in told), told
    assert row["lost"] > 0  # from a checkpoint: what flipped has been in the gradients of all


@pytest.mark.matrix
def test_a_slow_rank_is_put_aside_and_comes_back(tmp_path):
    longer = ("model.d_model=96", "model.layers=4", "data.sequence=128")
    outcome = chaos(tmp_path, "slow", Row(longer, nodes=2, tolerance=1e-4), 120)
    assert failed(outcome) == [] and outcome["passed"]
    (row,) = outcome["rows"]
    assert 5.0 < row["noticed"] < 20.0 and row["lost"] == 0
    told = told_of(tmp_path / "out/faults/run/metrics.jsonl")
    assert any(
        re.search(r"rank \d of \S+ is \S+ times as slow as others: \S+ is put aside for 8 s", each) for each in told
    )


@pytest.mark.matrix
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("plan", PLANS)
def test_each_fault_under_each_plan(plan, faults, tmp_path):
    row = PLANS[plan]
    if faults == "bits" and not row.voted:
        pytest.skip("of this plan there are no replicas that could vote")
    kinds = FAULTS[faults]
    outcome = chaos(tmp_path, kinds, row, 120 * len(kinds.split(",")))
    assert failed(outcome) == [] and outcome["passed"]

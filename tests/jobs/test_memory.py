"""What a run writes of its memory: levels by role, bytes moved beside the planned, the report; with `plan.memory` and
without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal import Plan
from shoal.chunks import Tier
from shoal.chunks.tier import ALL_ELSE
from shoal.comm.ledger import Ledger
from shoal.jobs.choose import microbatches_of
from shoal.jobs.memory import tiers
from shoal.jobs.train import train
from shoal.optim.buddy import FOR_BUDDY
from shoal.report.levels import read_memory_traces
from tests.jobs.conftest import records_of


@pytest.mark.parametrize("update", ["at once", "deferred"])
def test_a_run_with_tiers(make_job, alone, tmp_path, monkeypatch, update):
    monkeypatch.setattr("shoal.jobs.train.peak_flops", lambda engine: 1e11)
    memory = {"device": "300KiB", "chunk": "8KiB", "disk": str(tmp_path / "disk"), "update": update}
    job = replace(make_job(precision="bf16", model={"layers": 3, "d_model": 32}, steps=8), plan=Plan(memory=memory))
    outcome = train(job, {}, alone)
    traces = read_memory_traces(Path(job.run.dir) / "memory.jsonl")
    assert [trace.step for trace in traces] == [3, 4, 5, 6, 7]
    for trace in traces:
        assert list(trace.levels) == ["device", "host", "disk"] and trace.counts_all
        assert trace.budgets == {"device": 300 * 1024} and 0 < trace.most <= 300 * 1024
        assert {"weights in use", "activations", "gradients on loan"} <= trace.levels["device"].keys()
        assert "optimizer state in turn" in trace.levels["host"]
        assert trace.levels["disk"]["optimizer state"][0] > trace.levels["disk"]["masters"][0] > 0
    files = sum(path.stat().st_size for path in (tmp_path / "disk" / "rank-0").iterdir() if path.name[0] == "0")
    assert traces[-1].total("disk")[-1] == files
    moves = records_of(job).moves
    assert {each.step for each in moves} >= {3, 4, 5, 6, 7}
    for each in moves:
        assert set(each.planned) == {"weights to the device", "gradients home", "pages read", "pages written"}
        assert each.moved == each.planned and all(each.moved.values())
        assert each.planned["weights to the device"] <= each.otherwise["each goes after its use"]
    page = outcome.report.read_text()
    assert "<h2>Memory</h2>" in page and "<h2>Bytes moved</h2>" in page and "var(--role-8)" in page
    events = json.loads((Path(job.run.dir) / "trace.json").read_text())["traceEvents"]
    assert {each["name"] for each in events if each["ph"] == "C"} == {"device memory", "host memory", "disk memory"}


def test_a_run_without_tiers_shows_what_is_known(make_job, alone, monkeypatch):
    monkeypatch.setattr("shoal.jobs.train.peak_flops", lambda engine: 1e11)
    job = make_job(precision="bf16")
    outcome = train(job, {}, alone)
    trace = read_memory_traces(Path(job.run.dir) / "memory.jsonl")[-1]
    roles = {role: sizes[-1] for role, sizes in trace.levels["host"].items()}
    assert roles["gradients"] == roles["masters"] == 2 * roles["weights"] > 0, "two bytes a weight, four of the others"
    assert 2 * roles["masters"] <= roles["optimizer state"] + 64 * 1024, "Adam's two averages, without padding"
    assert 2 * roles["masters"] * 0.8 < roles["optimizer state"] < 2 * roles["masters"] * 1.2
    assert not trace.counts_all and records_of(job).moves == ()
    page = outcome.report.read_text()
    assert "<h2>Memory</h2>" in page and "and no activations" in page and "<h2>Bytes moved</h2>" not in page


def test_on_a_gpu_the_allocator_says_what_else_is_there(monkeypatch):
    """What was given out, less what is counted; looked at before memory is taken and after it is given back."""
    given_out = 1000
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: given_out)
    ledger = Ledger()
    ledger.recording = True
    tier = Tier("plan.memory.device", device=torch.device("cuda"), ledger=ledger)
    tier.take("weights in use", 600)
    given_out = 1700
    tier.give("weights in use", 600)
    assert [(level.role, level.nbytes) for level in ledger.take_levels()] == [
        (ALL_ELSE, 1000),
        ("weights in use", 600),
        ("weights in use", 0),
        (ALL_ELSE, 1700),
    ]
    ledger.watch = tier.look
    with ledger.span("compute", "forward"):
        given_out = 1900
    assert [level.nbytes for level in ledger.take_levels()] == [1700, 1900]


def test_what_is_kept_for_a_buddy_is_in_the_memory_of_the_host(monkeypatch):
    """On an accelerator too: what its allocator has given out is none of that."""
    monkeypatch.setattr("shoal.jobs.memory.is_accelerator", lambda device: device.type == "cuda")
    parts = SimpleNamespace(tier=None, host=None, chunks=[], buddy=SimpleNamespace(nbytes=70))
    optimizer = SimpleNamespace(torch=SimpleNamespace(state={}))

    def held(device: str) -> dict[str, dict[str, int]]:
        engine = SimpleNamespace(device=torch.device(device), parts=parts, optimizer=optimizer, ledger=Ledger())
        return {tier.name: tier.held for tier in tiers(engine)}

    state = {"optimizer state": 0}
    assert held("cuda") == {"memory.device": state, "memory.host": {FOR_BUDDY: 70}}
    assert held("cpu") == {"memory.host": {**state, FOR_BUDDY: 70}}
    parts.buddy = None
    assert held("cuda") == {"memory.device": state}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("given", "plan", "each"),
    [
        ({"microbatch": None}, Plan(), (8, 1)),
        ({"microbatch": None}, Plan(pp=2), (1, 8)),
        ({"microbatch": None, "sync_bn": True}, Plan(pp=2), (8, 1)),
        ({"microbatch": None, "sync_bn": True}, Plan(dp=2, shares=[3, 1]), (6, 1)),
        ({"microbatch": 2}, Plan(dp=2, shares=[3, 1]), (2, 3)),
    ],
)
def test_the_microbatches_of_a_job_are_those_of_its_engine(make_job, given, plan, each):
    """Statistics of the global batch take all rows of a rank at once, also where there are stages."""
    assert microbatches_of(replace(make_job(**given), plan=plan)) == each

"""Jobs of models whose buffers replicas cannot keep as one process would get plans that the engine does not refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from shoal.cli import answer as shown
from shoal.errors import UserError
from shoal.jobs import auto
from shoal.jobs.asking import answer, asked, stays
from shoal.jobs.choose import Settled, opened
from shoal.jobs.read import parse_job
from shoal.models import build
from shoal.planner.buffers import why_not_kept
from shoal.planner.cluster import Link
from shoal.planner.kept_profiles import _read, _written
from shoal.planner.prepare import Subject
from shoal.planner.profile import profile
from shoal.precision import precision
from tests.planner.test_auto import machine

MODEL = {"name": "gpt", "layers": 2, "d_model": 32, "heads": 4, "vocab_size": 257, "sequence": 16}
ROW = {key: torch.zeros(16, dtype=torch.int64) for key in ("input_ids", "labels")}


class Counted(nn.Module):
    """A layer that keeps a moving average of what it gives."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("average", torch.zeros(32))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        self.average.lerp_(outputs.detach().mean((0, 1)), 0.1)
        return outputs


def spectral() -> nn.Module:
    """A GPT with weights that are divided by a norm, which each forward brings nearer from vectors in buffers."""
    model = build(MODEL).factory()
    for block in model.blocks:  # type: ignore[union-attr]
        spectral_norm(block.mlp.down)
    return model


def averaging() -> nn.Module:
    model = build(MODEL).factory()
    model.blocks[0].mlp.down = Counted(model.blocks[0].mlp.down)  # type: ignore[index, union-attr]
    return model


def subject(factory: Callable[[], nn.Module]) -> Subject:
    return Subject(factory, build(MODEL).loss, ROW, 1, precision("fp32"))


class ByGroups(nn.Module):
    """A linear map as a product by groups, of which there is one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.T.unsqueeze(0).contiguous())

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(0, 1)
        ends = torch.full((1,), len(rows), dtype=torch.int32)
        return F.grouped_mm(rows, self.weight, offs=ends).unflatten(0, inputs.shape[:2])


def by_groups() -> nn.Module:
    model = averaging()
    model.blocks[1].mlp.down = ByGroups(model.blocks[1].mlp.down)  # type: ignore[index, union-attr]
    return model


@pytest.fixture
def settled(tmp_path: Path) -> Callable[..., Settled]:
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)

    def made(plan: Any = None, factory: Callable[[], nn.Module] = spectral, **train: Any) -> Settled:
        data = {"source": str(tmp_path / "text.txt"), "sequence": 16, "validation": 0.0}
        content = {"model": MODEL, "data": data, "train": {"steps": 4, "global_batch": 8, **train}}
        found = opened(*parse_job(content if plan is None else {**content, "plan": plan}))
        values = {**found.model.values, "own": factory.__name__}
        return replace(found, model=replace(found.model, factory=factory, values=values))

    return made


def test_what_replicas_cannot_keep_is_seen_on_fake_tensors() -> None:
    both = why_not_kept(subject(spectral))
    assert "blocks.0.mlp.down.parametrizations.weight.0._" in both["copies"]
    assert both["tokens"] == both["copies"].replace("plan.dp = 1", "plan.dp = 1 with plan.cp = 1")
    assert "one process would have it otherwise than several ranks" in both["copies"]
    cut = why_not_kept(subject(averaging))
    assert cut["copies"] == "" and "mlp.down.average, and with plan.cp = 2 each rank sees a part" in cut["tokens"]
    assert why_not_kept(subject(build(MODEL).factory)) == {"copies": "", "tokens": "", "stages": ""}


def test_a_forward_with_products_by_groups_is_watched_in_fp32(caplog: pytest.LogCaptureFixture) -> None:
    assert "mlp.down.average" in why_not_kept(subject(by_groups))["tokens"]
    assert not caplog.records  # torch's stand-in takes bf16 alone, and says so


def test_a_profile_keeps_it() -> None:
    found = profile(subject(averaging), {})
    assert found.buffers["tokens"] and _read(json.loads(json.dumps(_written(found)))) == found


def test_a_job_has_one_replica_or_says_what_is_missing(settled: Callable[..., Settled]) -> None:
    chosen = asked(settled("auto"), machine(2))
    assert chosen.plan.size == 2 and chosen.plan.replicas == 1
    (said,) = (line for line in shown.reasons(chosen, shown.explain(chosen.task, chosen.estimate, (), False))
               if "no data parallelism" in str(line))  # fmt: skip
    assert "a forward writes the buffer" in str(said)
    plan, _, _, why = answer(settled("auto"), machine(2), True)
    assert plan == chosen.plan.to_dict() and "a step predicted; one replica: a forward writes the buffer" in why
    for pins, error in (
        ({"dp": 2}, r"otherwise than several ranks.*train.buffers in a job"),
        ({"cp": 2}, r"otherwise than several ranks.*train.buffers in a job"),
        ({"tp": 1, "pp": 1}, r"train.buffers in a job.*Without replicas: no degrees fit 2 devices"),
    ):
        with pytest.raises(UserError, match=error):
            asked(settled({"name": "auto", **pins}), machine(2))
    assert asked(settled({"name": "auto", "tp": 1, "pp": 1}, buffers="averaged"), machine(2)).plan.dp == 2
    assert asked(settled("auto"), machine(1)).plan.size == 1


def test_rows_are_not_cut_where_a_buffer_sees_them(settled: Callable[..., Settled]) -> None:
    with pytest.raises(UserError, match=r"average, and with plan.cp = 2 each rank sees a part"):
        asked(settled({"name": "auto", "cp": 2}, averaging), machine(2))
    assert asked(settled({"name": "auto", "tp": 1, "pp": 1}, averaging), machine(2)).plan.dp == 2


def test_data_parallelism_does_not_stay_where_the_engine_refuses_it(settled: Callable[..., Settled]) -> None:
    two = machine(2)
    near = replace(two, hosts=(replace(two.hosts[0], inside=Link(1e-9, 1e12)),))
    rows = {"global_batch": 64, "microbatch": 32}
    assert stays(settled(buffers="averaged", **rows), near) is not None
    assert stays(settled(**rows), near) is None
    plan, *_ = answer(settled(**rows), near, True)
    assert plan is not None and plan.get("dp", 1) == 1 and plan.get("cp", 1) == 1


def test_a_budget_is_of_plans_with_one_replica(settled: Callable[..., Settled], monkeypatch: Any) -> None:
    """`shoal plan --on`, whose number of hosts follows from prices, too."""
    own, priced = settled("auto"), machine(1)
    host = replace(priced.hosts[0], price=1.0)
    monkeypatch.setattr(auto, "load_job", lambda *_: (own.job, own.origins))
    monkeypatch.setattr(auto, "opened", lambda *_: own)
    monkeypatch.setattr(auto, "cluster_of", lambda *_: replace(priced, hosts=(host, host)))
    chosen = auto.ask(Path("job.toml"), [], auto.Asked("two.toml", budget=1.0))
    assert chosen.plan.replicas == 1

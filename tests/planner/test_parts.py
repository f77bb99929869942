"""What parts of a model take: counted against formulas, kept bytes against the dry run of the whole, and the cuts that
follow."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from shoal import Plan, UserError
from shoal.models import GPT, GPTConfig, build, causal_lm
from shoal.pipeline import make_schedule
from shoal.pipeline.units import units_of
from shoal.planner import Part, Subject, dry_run, dry_run_stages, parts_of, with_stages
from shoal.planner import parts as parts_module
from shoal.planner.parts import cut, under_way
from shoal.precision import precision

VOCABULARY, T, D, LAYERS, BATCH = 300, 16, 32, 6, 2
CFG = GPTConfig(vocab_size=VOCABULARY, sequence=T, layers=LAYERS, d_model=D, heads=4, tied=False)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
CPU = torch.device("cpu")


def subject(plan: Plan, kind: str = "fp32") -> Subject:
    sample = {"input_ids": torch.zeros(T, dtype=torch.int64), "labels": torch.zeros(T, dtype=torch.int64)}
    return Subject(partial(GPT, CFG), causal_lm, sample, BATCH, precision(kind), plan)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_operations_bytes_kept_and_bytes_that_rest(recompute):
    asked = subject(Plan(pp=2, recompute=recompute))
    found = {part.name: part for part in parts_of(asked, ADAMW, False, CPU)}
    assert [*found] == [
        "token_embedding",
        "position_embedding",
        *(f"blocks.{i}" for i in range(LAYERS)),
        "norm",
        "head",
    ]
    products = 2 * BATCH * T * 12 * D**2 + 2 * 2 * BATCH * T * T * D  # of matrices, and of attention
    assert found["blocks.0"].forward == products and found["head"].forward == 2 * BATCH * T * D * VOCABULARY
    assert found["blocks.0"].backward == (3 if recompute == "full" else 2) * products
    assert found["head"].backward == 2 * found["head"].forward and found["token_embedding"].forward == 0
    assert sum(part.saved for part in found.values()) == dry_run(subject(Plan(recompute=recompute))).activations
    ((stage, kept),) = dry_run(replace(asked, plan=replace(asked.plan, stages=[4, 2]))).stages
    assert stage == 0 and kept == sum(part.saved for part in [*found.values()][: 2 + 4])
    weights = sum(p.numel() for p in GPT(CFG).blocks[0].parameters())
    assert found["blocks.0"].resting == pytest.approx(16 * weights, rel=0.02)  # chunks round up


def test_the_state_of_shards_is_shared():
    whole, shared = (
        sum(part.resting for part in parts_of(subject(Plan(pp=2, dp=4, zero=zero)), ADAMW, False, CPU))
        for zero in (0, 3)
    )
    assert shared == pytest.approx(whole / 4, rel=0.05)


def test_times_are_taken_once_of_parts_that_are_alike(monkeypatch):
    asked, timed = subject(Plan(pp=2), kind="bf16"), []
    time_one = parts_module._time
    monkeypatch.setattr(
        parts_module, "_time", lambda module, *more: timed.append(type(module)) or time_one(module, *more)
    )
    found = parts_of(asked, ADAMW, True, CPU)
    assert len(timed) == 5, "two embeddings, a block, norm and head"
    assert all(part.forward > 0 and part.backward > 0 for part in found)
    assert found[2].forward == found[3].forward


class Writing(nn.Module):
    """Layers that are no blocks of a GPT: recurrent, dropping, and writing to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adding(), Adding()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.drop = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        x *= 2
        return self.out(x) + self.drop(self.inner(x)[0])


def test_layers_that_drop_recur_and_write_are_timed():
    def loss(model, mb):
        return model(mb["x"]).square().sum(), len(mb["x"])

    asked = Subject(Writing, loss, {"x": torch.zeros(16, 8)}, BATCH, precision("fp32"), Plan(pp=2, stages="measured"))
    assert with_stages(asked.plan, asked, ADAMW, 4, CPU).stages == [1, 1]


class Uneven(nn.Module):
    """Layers of which the first ones work on every place of a large picture."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(8, 8, 5, padding=2, stride=2 if place in (1, 2) else 1) for place in range(8))
        )

    def forward(self, x):
        return self.layers(x)


def test_operations_see_what_elements_of_matrices_do_not():
    def loss(model, mb):
        return model(mb["x"]).square().sum(), len(mb["x"])

    asked = Subject(Uneven, loss, {"x": torch.zeros(8, 256)}, BATCH, precision("fp32"), Plan(pp=2, stages="counted"))
    assert with_stages(asked.plan, asked, ADAMW, 4, CPU).stages == [2, 6]


def parts(*costs: float, saved: int = 0, resting: int = 0) -> list[Part]:
    return [Part(f"layers.{place}", cost / 3, 2 * cost / 3, saved, resting) for place, cost in enumerate(costs)]


def test_memory_moves_the_cut():
    units = units_of(Uneven())
    one = make_schedule("1f1b", 2, 8)
    assert under_way(one) == [2, 1]
    assert cut(parts(*[1.0] * 8, saved=10, resting=5), units, one) == [4, 4]
    assert cut(parts(*[1.0] * 8, saved=10, resting=5), units, one, limit=80) == [3, 5], (
        "the first stage keeps two microbatches"
    )
    with pytest.raises(UserError, match="no cut into 2 stages leaves each within"):
        cut(parts(*[1.0] * 8, saved=10, resting=5), units, one, limit=70)
    gpipe = make_schedule("gpipe", 2, 8)
    assert under_way(gpipe) == [8, 8]


def test_stages_as_they_are_given_stay():
    for stages in (None, [1, 5], [["token_embedding"], ["blocks"]]):
        plan = Plan(pp=2, stages=stages)
        assert with_stages(plan, subject(plan), ADAMW, 4, CPU) is plan


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("mesured", 'plan.stages = "mesured": give .* Did you mean "measured"'),
        ({"name": "counted", "memori": 3}, 'plan.stages = "counted" has no parameter memori; it has memory'),
        ({"name": "counted", "memory": "much"}, "plan.stages.memory = 'much': give bytes"),
        ({"name": "counted", "memory": 1000}, "no cut into 2 stages leaves each within"),
    ],
)
def test_what_is_wrong_is_named(stages, message):
    plan = Plan(pp=2, stages=stages)
    with pytest.raises(UserError, match=message):
        with_stages(plan, subject(plan), ADAMW, 4, CPU)


def test_stages_of_experts_in_fp32_are_run_dry():
    """Torch's stand-in for products by groups takes bf16 alone."""
    config = {"model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 16, "moe_intermediate_size": 16}
    config |= {"head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"num_experts": 4, "num_experts_per_tok": 2}
    model = build({"name": "hf", "config": config, "num_hidden_layers": 2})
    row = {key: torch.zeros(8, dtype=torch.int64) for key in ("input_ids", "labels")}
    staged = dry_run_stages(Subject(model.factory, model.loss, row, 1, precision("fp32"), Plan(pp=2)))
    assert len(staged.stages) == 2

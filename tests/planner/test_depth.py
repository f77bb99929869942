"""A deep model's recording made from a shallow one's equals its own, event by event; where it would not, none is
made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Plan
from shoal.models import build
from shoal.optim.groups import decay_matrices_only
from shoal.planner import (
    SHALLOW,
    Blocks,
    KnownStages,
    Recording,
    Staged,
    Subject,
    alike_blocks,
    blocks_by_stage,
    deepened,
    dry_run,
    dry_run_stages,
    equal,
    equal_stages,
)
from shoal.precision import precision

GPT = {"name": "gpt", "preset": "1m", "vocab_size": 61, "sequence": 16}
HF = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
MOE = {"experts": 4, "per_token": 2, "d_ff": 32}
SAMPLE = {"input_ids": torch.zeros(16, dtype=torch.long), "labels": torch.zeros(16, dtype=torch.long)}
DEEP = 7


def hf(kind: str, **settings: Any) -> dict[str, Any]:
    pytest.importorskip("transformers")
    return {"name": "hf", "config": {**HF, "model_type": kind, **settings}}


def both(
    table: dict[str, Any], plan: Plan, kind: str = "fp32", key: str = "layers"
) -> tuple[Recording | None, Recording]:
    """The deep model's recording from the shallow one's, and its own."""
    small, large = (build({**table, key: number}) for number in (SHALLOW, DEEP))
    rows, numbers = large.prepare_data([SAMPLE]), precision(kind)
    groups = decay_matrices_only(0.1)

    def run(spec: Any) -> Recording:
        return dry_run(Subject(spec.factory, spec.loss, rows[0], 4, numbers, plan, groups))

    blocks = alike_blocks(small.factory, large.factory, numbers)
    return None if blocks is None else deepened(run(small), blocks), run(large)


PLANS = [
    (Plan(), "fp32"),
    (Plan(recompute="full"), "bf16"),
    (Plan(recompute="selective"), "bf16"),
    (Plan(tp=2), "bf16"),
    (Plan(cp=2, zero=2, memory={}), "fp32"),
]


@pytest.mark.parametrize(("plan", "kind"), PLANS, ids=str)
def test_a_deep_model_from_a_shallow_one(plan, kind):
    for table in (GPT, {**GPT, "dropout": 0.1, "positions": "learned"}):
        # keys of dropout live longer there: the comparison at the own depth fails
        if plan.tp == 1 or "dropout" not in table:
            deep, own = both(table, plan, kind)
            assert deep is not None and equal(deep, own)


def test_bert_and_models_of_transformers():
    deep, own = both({"name": "bert", "vocab_size": 61, "sequence": 16, "d_model": 32, "heads": 4}, Plan())
    assert deep is not None and equal(deep, own)
    for kind in ("llama", "qwen3"):
        deep, own = both(hf(kind, head_dim=8), Plan(), "bf16", "num_hidden_layers")
        assert deep is not None and equal(deep, own)
    for kind, key in (("gpt2", "n_layer"), ("bloom", "n_layer"), ("mpt", "n_layers")):
        small = {"n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 32}
        small |= {"bloom": {"n_head": 4}, "mpt": {"d_model": 32, "n_heads": 4, "max_seq_len": 32}}.get(kind, {})
        deep, own = both({"name": "hf", "config": {"model_type": kind, **small}}, Plan(), "bf16", key)
        assert deep is not None and equal(deep, own)


STAGES = [
    (Plan(pp=4), "bf16"),
    (Plan(pp=2, schedule="interleaved"), "fp32"),
    (Plan(pp=3, tp=2, dp=2, zero=1, recompute="full"), "fp32"),
    (Plan(pp=4, stages=[2, 7, 3, 6]), "fp32"),
    (Plan(pp=4, stages=[1, 7, 3, 7]), "fp32"),
    (Plan(pp=10, stages=[1, *[2] * 8, 1]), "bf16"),
    (Plan(pp=2, stages=[1, 17]), "fp32"),
]


def deep_stages(plan: Plan, kind: str, number: int = 18, **settings: Any) -> tuple[Blocks, Any, Any]:
    """A GPT of `number` blocks: these, dry runs by blocks and plan, the blocks of the plan's stages."""
    numbers, groups = precision(kind), decay_matrices_only(0.1)

    def run(blocks: int, plan: Plan) -> Staged:
        spec = build({**GPT, **settings, "layers": blocks})
        rows = spec.prepare_data([SAMPLE])
        return dry_run_stages(Subject(spec.factory, spec.loss, rows[0], 4, numbers, plan, groups))

    small, large = (build({**GPT, **settings, "layers": blocks}).factory for blocks in (SHALLOW, number))
    many, blocks = blocks_by_stage(small, number, plan), alike_blocks(small, large, numbers)
    assert many is not None and blocks is not None and sum(many) == number
    return blocks, run, many


@pytest.mark.parametrize(("plan", "kind"), STAGES, ids=str)
def test_the_stages_of_a_deep_model_from_those_of_a_shallow_one(plan, kind):
    """18 blocks from at most 12."""
    blocks, run, many = deep_stages(plan, kind)
    known = KnownStages(blocks)
    few = known.lacking(many)
    assert sum(few) <= 12 and (plan.stages is None or list(many) == plan.stages)
    shallow = run(sum(few), replace(plan, pp=len(few), schedule="1f1b", stages=list(few)))
    known.add(shallow, few)
    assert not known.lacking(many) and sum(few) > SHALLOW
    assert equal_stages(known.of(many), run(18, plan))
    unsure = KnownStages(replace(blocks, from_second=False))
    unsure.add(shallow, few)
    assert (unsure.of(many) is None) == (many[0] == 1), "it begins its second stage with the second block"


FEWER = [
    (Plan(pp=3), "bf16", (2, 2, 2)),
    (Plan(pp=3, recompute="full"), "fp32", (3, 2, 4, 3)),
    (Plan(pp=2), "fp32", (4, 2)),
]


@pytest.mark.parametrize(("plan", "kind", "few"), FEWER, ids=str)
def test_the_stages_of_a_model_from_those_of_a_deeper_one(plan, kind, few):
    blocks, run, many = deep_stages(plan, kind, 14, dropout=0.1)
    known = KnownStages(blocks)
    known.add(run(14, plan), many)
    assert not known.lacking(few)
    assert equal_stages(known.of(few), run(sum(few), replace(plan, pp=len(few), stages=list(few))))


@pytest.mark.parametrize("unlike", [None, 1], ids=str)
def test_a_first_stage_of_one_block_asks_for_a_second_block_like_those_that_follow(unlike):
    def model(number: int) -> nn.Module:
        blocks = [nn.Linear(4, 4, bias=place != unlike) for place in range(number)]
        return nn.ModuleDict({"blocks": nn.ModuleList(blocks)})

    blocks = alike_blocks(partial(model, SHALLOW), partial(model, 9), precision("fp32"))
    assert blocks is not None and blocks.from_second == (unlike is None)


def test_which_stages_are_still_to_be_run():
    blocks, run, many = deep_stages(Plan(pp=2), "fp32", 10)
    known = KnownStages(blocks)
    assert known.lacking((9, 7, 3, 1, 5)) == (4, 1, 4, 4), "one of four says what three do"
    assert known.lacking((1, 2, 2, 2, 1)) == (1, 2, 2, 1) and known.lacking((1, 9)) == (1, 4)
    known.add(run(10, Plan(pp=2)), many)
    assert known.lacking((9, 2)) == () and known.lacking((2, 1)) == (4, 1) and known.lacking((5, 3, 3)) == (2, 3, 1)


UNLIKE = [{"name": "blocks", "every": 2}, {"name": "blocks", "full": 2}, {"name": "budget", "keep": 0.6}]


@pytest.mark.parametrize("recompute", UNLIKE, ids=str)
def test_recompute_that_treats_blocks_differently(recompute):
    deep, own = both(GPT, Plan(recompute=recompute))
    assert deep is None or equal(deep, own)


@pytest.mark.parametrize("every", [2, 4])
def test_blocks_of_several_kinds_are_not_alike(every):
    deep, _ = both({**GPT, "moe": {**MOE, "every": every}}, Plan())
    assert deep is None


def test_windows_of_later_layers_are_seen():
    windows = hf("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=5)
    deep, _ = both(windows, Plan(), "bf16", "num_hidden_layers")
    assert deep is None


def test_what_is_done_with_all_blocks_shows_in_the_comparison():
    """The auxiliary losses of all blocks are stacked: a tensor grows with their number."""
    deep, own = both({**GPT, "moe": MOE}, Plan())
    assert deep is not None and not equal(deep, own)


def test_models_without_blocks_are_not_alike():
    lstm = {"name": "lstm", "vocab_size": 61}
    numbers = precision("fp32")
    assert (
        alike_blocks(build({**lstm, "layers": SHALLOW}).factory, build({**lstm, "layers": DEEP}).factory, numbers)
        is None
    )

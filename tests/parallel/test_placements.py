"""Placements that a plan gives: layers are cut as they say, the rest is found, and the numbers stay those of one
process."""

from __future__ import annotations

import re
import tomllib
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shoal import Engine, Plan
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from tests.parallel.test_graph import made, samples, trained
from tests.parity.cases import CASES, engine, gathered
from tests.parity.covering import thinned
from tests.parity.runs import one_process
from tests.parity.runs import trained as trained_case
from tests.parity.test_parity import compare
from tests.pool import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "dp2-tp2-zero3": {"dp": 2, "tp": 2, "zero": 3},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "offload": {"tp": 2, "recompute": "full", "memory": {}},
}
PINS: dict[str, tuple[str, dict[str, str]]] = {
    "up": ("gpt", {"blocks.*.mlp.up": "whole"}),
    "attention": ("gpt", {"blocks.0.attention": "whole", "**.up": "column"}),
    "words": ("gpt", {"token_embedding": "whole"}),
    "head": ("gpt", {"head": "whole"}),
    "tied": ("tied", {"head": "whole"}),
    "dropout": ("gpt-rotary-dropout", {"**.qkv": "whole"}),
    "a layer": ("llama", {"model.layers.0": "whole", "model.layers.1.mlp.down_proj": "row"}),
    "lm_head": ("llama", {"lm_head": "whole"}),
    "keys": ("llama", {"**.k_proj": "whole"}),
    "conv1d": ("gpt2", {"**.c_fc": "whole", "**.attn.c_proj": "row"}),
    "bert": ("bert", {"**.qkv": "whole"}),
    "experts": ("mixtral", {"**.experts": "whole"}),
    "all": ("gpt", {"blocks.*": "whole", "token_embedding": "whole", "head": "whole"}),
}
ROWS = [(pin, plan) for pin in PINS for plan in PLANS if (pin, plan) != ("experts", "cp2-tp2")]
COVERING = {("attention", "dp2-tp2-zero3"), ("a layer", "tp2")}


@pytest.mark.parametrize(("pin", "plan"), thinned(ROWS, COVERING))
def test_pinned_layers_compute_what_one_process_does(pin: str, plan: str):
    case, placements = PINS[pin]
    precision = "fp32" if case == "mixtral" else "fp64"
    options = {**PLANS[plan], "placements": placements}
    size = Plan(**{**PLANS[plan], "memory": None}).size
    traces = run_ranks(trained_case, size, case, precision, 1, options, plan, False)
    tolerance = (1e-6, 1e-5, 2e-5) if precision == "fp32" else (1e-9, 1e-9, 1e-9)
    compare(traces[0], one_process(case, precision, 1, False), *tolerance)


def layers_of(world, case: str, placements: dict[str, str], rules: dict[str, str] | None = None) -> dict[str, str]:
    running = engine(case, "fp64", 1, world=world, plan=Plan(tp=2, placements=placements), tensor_rules=rules)
    found = {each.name: each.kind for each in running.tensor_layers.layers}
    running.close()
    return found


@pytest.mark.parametrize(
    ("case", "placements", "wanted"),
    [
        ("gpt", {"**.up": "whole"}, {"": "sequence", "blocks.0.mlp.down": "whole", "blocks.0.attention.qkv": "qkv"}),
        ("gpt", {"blocks.0.attention.out": "whole"}, {"": None, "blocks.0.attention.qkv": "whole", "head": "head"}),
        ("gpt", {"blocks.0.attention": "whole"}, {"blocks.0.attention": None, "blocks.1.attention": "attention"}),
        ("tied", {"head": "whole"}, {"token_embedding": "whole", "": None}),
        ("gpt", {"**": "whole", "blocks.1.*.up": "column", "blocks.1.*.down": "row", "": "column"}, None),
        ("llama", {"**.q_proj": "whole"}, {"model.layers.0.self_attn.o_proj": "whole", "lm_head": "head"}),
    ],
)
def test_what_goes_together_stays_whole_together(case, placements, wanted):
    if wanted is None:
        with pytest.raises(UserError, match="cannot be"):
            simulate_world(2, layers_of, case, placements)
        return
    found = simulate_world(2, layers_of, case, placements)[0]
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("case", "placements", "said"),
    [
        ("gpt", {"**.up": "row"}, 'blocks.0.mlp.up cannot be "row": leave it out, or give "column" or "whole"'),
        ("gpt", {"**.up": "whole", "nix": "row"}, "plan.placements['nix']: the model has no module of such a name"),
        ("gpt", {"**.up": "columns"}, "placements['**.up'] = 'columns' is none of column, row, vocabulary, whole. Did"),
        ("gpt", "whole", "plan.placements = 'whole': give a table"),
        ("gpt", {"blocks.0.mlp": "column"}, 'blocks.0.mlp cannot be "column" (it holds blocks.0.mlp.'),
        (
            "llama",
            {"**.up_proj": "whole", "**.down_proj": "row"},
            'model.layers.0.mlp.up_proj cannot be "whole" while model.layers.0.mlp.down_proj is "row"',
        ),
        ("llama", {"lm_head": "column"}, 'lm_head cannot be "column": leave it out, or give "vocabulary" or "whole"'),
    ],
)
def test_what_cannot_be_is_refused_with_what_it_may_be(case, placements, said):
    with pytest.raises(UserError) as error:
        simulate_world(2, layers_of, case, placements)
    assert said in str(error.value)


def test_experts_that_ranks_share_are_not_whole_along_tp():
    plan = {"dp": 2, "ep": 2, "tp": 2, "placements": {"**.experts": "whole"}}
    with pytest.raises(UserError, match="experts that ranks along ep share are cut along tp too"):
        simulate_world(4, trained_case, "mixtral", "fp32", 1, plan, "", False)


GRAPH = {
    "one block": ({"blocks.0": "whole"}, {"blocks.0.up": "whole", "blocks.2.up": "column"}),
    "attention": ({"blocks.1.out": "whole"}, {"blocks.1.qkv": "whole", "blocks.1.norm": "whole"}),
    "embedding": ({"words": "whole"}, {"words": "whole", "head": "whole"}),
    "the other way": ({"picture.less": "column"}, {"picture.more": "row", "picture.wide": "whole"}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.matrix) if each in ("one block", "embedding") else each for each in GRAPH],
)
def test_a_model_without_rules_is_cut_as_it_is_pinned(name):
    placements, wanted = GRAPH[name]
    alone = simulate_world(1, trained, {})[0][0]

    def both(world, placements: dict[str, str]) -> tuple[list[float], dict[str, str]]:
        running = made(world, {"tp": 2, "placements": placements})
        losses = [running.step(batch).loss for batch in running.batches(samples(), steps=3)]
        kinds = {each.name: each.kind for each in running.tensor_layers.layers}
        running.close()
        return losses, kinds

    for losses, kinds in simulate_world(2, both, placements):
        assert losses == pytest.approx(alone, rel=1e-9)
        assert {each: kinds[each] for each in wanted} == wanted


@pytest.mark.parametrize(
    ("placements", "said"),
    [
        ({"**.up": "row"}, 'blocks.0.up cannot be "row" (chunk needs all of it): leave it out, or give "column"'),
        ({"blocks.1.qkv": "column", "blocks.1.out": "whole"}, 'qkv cannot be "column" beside the others'),
        pytest.param(
            {"norm": "column"}, 'norm cannot be "column": leave it out, or give "whole"', marks=pytest.mark.matrix
        ),
    ],
)
def test_what_a_graph_does_not_allow_is_refused(placements, said):
    with pytest.raises(UserError) as error:
        simulate_world(2, trained, {"tp": 2, "placements": placements})
    assert said in str(error.value)


class Calibrated(transformers.LlamaForCausalLM):
    """With a layer behind the head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.behind = nn.Linear(config.vocab_size, config.vocab_size)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        return self.behind(super().forward(input_ids, position_ids=position_ids).logits)


def behind_the_logits(world, plan: dict[str, Any]) -> list[float] | str:
    """The losses of two steps, or what is refused."""
    case, running = CASES["llama"], None
    try:
        running = Engine(
            lambda: Calibrated(case.factory().config), case.loss, partial(torch.optim.SGD, lr=0.1), Plan(**plan),
            global_batch=4, microbatch=2, precision="fp64", world=world,
        )  # fmt: skip
        return [float(running.step(batch).loss) for batch in running.batches(case.data(), steps=2)]
    except UserError as refusal:
        return str(refusal)
    finally:
        if running is not None:
            running.close()


def test_logits_for_layers_of_another_stage_are_refused_with_what_does():
    """Both remedies are followed as they are said."""
    cut = {"tp": 2, "pp": 2, "stages": [["model", "lm_head"], ["behind"]]}
    refusals = set(simulate_world(4, behind_the_logits, cut))
    assert len(refusals) == 1, refusals
    said = re.search(
        r"keep it whole, plan\.(placements = \{.*\}), or give it and all that comes behind it", next(iter(refusals))
    )
    assert said is not None, refusals
    whole, together = {**cut, **tomllib.loads(said[1])}, {**cut, "stages": [["model"], ["lm_head", "behind"]]}
    (alone,) = simulate_world(1, behind_the_logits, {})
    for plan in (whole, together):
        for found in simulate_world(4, behind_the_logits, plan):
            assert found == pytest.approx(alone, rel=1e-9)


def replanned(world, directory: Any) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    running = engine("gpt", "fp64", 1, world=world, plan=Plan(tp=2))
    data = CASES["gpt"].data()
    losses = []
    for batch in running.batches(data, steps=3):
        if batch.step == 1:
            running.replan(Plan(tp=2, placements={"**.up": "whole"}))
            running.save(directory / "cut")
        losses.append(running.step(batch).loss)
    running.export(directory / "exported")
    running.close()
    later = engine("gpt", "fp64", 1, world=world, plan=Plan(tp=2, placements={"blocks.0": "whole"}))
    later.load(directory / "cut")
    again = [later.step(batch).loss for batch in later.batches(data, steps=2)]
    end = gathered(later, dict(later.optimizer.parameters))
    later.close()
    return losses, again, end


def test_placements_change_in_a_run_and_between_checkpoints(tmp_path):
    losses, again, _ = run_ranks(replanned, 2, tmp_path)[0]
    alone = one_process("gpt", "fp64", 1, False)
    assert losses == pytest.approx(alone.losses[:3], rel=1e-9)
    assert again == pytest.approx(alone.losses[1:3], rel=1e-9)


def test_a_plan_keeps_placements_as_it_was_given():
    plan = Plan(tp=2, placements={"**.up": "column"})
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.changed({"placements": "none"}, 2).placements is None

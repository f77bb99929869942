"""What fits: machines, other plans, the largest model of a family."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import Plan, UserError
from shoal.models import build, causal_lm
from shoal.planner import Machine, Prediction, Subject, dry_run, family, largest, others, predict, that_fit
from shoal.planner.fit import STEP
from shoal.planner.predict import lacking_most
from shoal.precision import precision
from shoal.units import enough, size
from tests.parity.cases import text
from tests.planner.test_memory import run_dry

MIB = 2**20
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


recorded = cache(run_dry)


def predicted(plan: Plan, machine: Machine) -> Prediction:
    return predict(recorded("fp32", plan.recompute), ADAMW, plan, precision("fp32"), machine, 1, process=MIB)


def test_a_machine_by_hand():
    """212,864 bytes of weights: with gradients and AdamW's state two ranks of one host need eight times that, and
    activations."""
    found = predicted(Plan(dp=2), Machine(64 * MIB, None, 2))
    need = found.need
    own = (
        4 * 212_864
        + 4 * sum(1 for _ in recorded("fp32", "none").parameters)
        + need.of("activations")
        + need.of("temporaries")
        + MIB
    )
    assert [(fit.memory, fit.needed) for fit in found.fits] == [("host memory", 2 * own)]
    assert found.free == 64 * MIB - 2 * own
    assert found.lacking(own) == "" and found.lacking(own - 1) == f"a dry run counts {own / MIB:.2f} MiB"
    shared = predicted(Plan(dp=2, zero=1), Machine(64 * MIB, None, 2))
    weights = next(row for row in shared.need.rows if row.role == "weights")
    assert weights.sharers == 2 and shared.need.total("device", 2) == 2 * shared.need.total("device") - weights.nbytes


def test_a_gpu_has_a_memory_of_its_own():
    found = predicted(Plan(memory={"device": "600KB"}), Machine(64 * MIB, MIB))
    assert [fit.memory for fit in found.fits] == ["plan.memory.device", "GPU memory", "host memory"]
    assert found.need.total("device") == found.need.least
    assert "host" not in {
        row.tier for row in predicted(Plan(), Machine(64 * MIB, MIB)).need.rows if row.role != "process"
    }


def test_what_the_plan_gives_the_host_and_the_disk_is_lacking_where_it_is_too_little(tmp_path):
    """The engine refuses both when it is made: a search took such a plan."""
    for machine in (Machine(64 * MIB), Machine(64 * MIB, 64 * MIB)):
        home = predicted(Plan(memory={"host": "64MiB"}), machine).fits[0]
        assert home.memory == "plan.memory.host" and home.free > 0
        assert predicted(Plan(memory={"host": home.needed}), machine).lacking(math.inf) == ""
        short = predicted(Plan(memory={"host": home.needed - 1}), machine).lacking(math.inf)
        assert short == f"plan.memory.host = {size(home.needed - 1)} is too little: take {enough(home.needed)} at least"
        paged = {"disk": {"path": str(tmp_path), "size": "1KiB"}}
        disk = predicted(Plan(memory=paged), machine)
        said = f"plan.memory.disk = 1.00 KiB is too little: take {enough(disk.need.total('disk'))} at least"
        assert disk.lacking(math.inf) == said


def test_of_several_ranks_the_one_that_is_shortest_says_what_to_take():
    """The first one that was short did: with what it said to take, a later stage was refused."""
    one = predicted(Plan(memory={"device": "60KiB"}), Machine(64 * MIB))
    (budget, *rest), more = one.fits, 4096
    two = replace(one, fits=(replace(budget, needed=budget.needed + more), *rest))
    said = f"plan.memory.device = 60.0 KiB is too little: take {enough(budget.needed + more)} at least"
    assert lacking_most([one, two], math.inf) == lacking_most([two, one], math.inf) == said
    assert lacking_most([predicted(Plan(), Machine(64 * MIB))], math.inf) == ""


def test_activations_that_wait_on_the_host_are_of_what_the_plan_gives_it():
    """A plan with a disk was printed whose pages filled what the host may use: its first microbatch was refused."""
    machine = Machine(64 * MIB, 64 * MIB)
    without = predicted(Plan(memory={"host": "64MiB"}), machine).fits[0].needed
    plan = Plan(memory={"host": "64MiB", "activations": 0.5})
    found = predicted(plan, machine)
    kept = sum(row.nbytes for row in found.need.rows if row.role == "activations")
    assert found.fits[0].needed == pytest.approx(without + kept, abs=1), "of the first microbatch all"


def test_other_plans_come_by_the_number_of_their_changes():
    plans = others(Plan(dp=2))
    assert plans[0] == Plan(dp=2, recompute="full") and plans[1] == Plan(dp=2, zero=1)
    assert len(plans) == 2 * 4 * 2 - 1 and plans[-1] == Plan(dp=2, zero=3, recompute="full", memory={})
    assert others(Plan(recompute="full", memory={})) == []


def test_plans_that_fit_are_those_that_are_tried():
    plan = Plan(dp=2)
    full = predicted(plan, Machine(64 * MIB, None, 2)).fits[0].needed
    found = that_fit(others(plan), lambda other: predicted(other, Machine(full - 1, None, 2)))
    assert found and all(each.free >= 0 and each.plan != plan for each in found)
    none = that_fit(others(plan), lambda other: predicted(other, Machine(1, None, 2)))
    assert len(none) == 1 and none[0].free == max(predicted(other, Machine(1, None, 2)).free for other in others(plan))


def test_what_the_engine_refuses_is_refused():
    with pytest.raises(UserError, match=r"does not go with plan\.zero = 1"):
        predicted(Plan(dp=2, zero=1, exchange="local_sgd"), Machine(MIB, None, 2))


@given(
    limit=st.integers(0, 5000), most=st.integers(1, 3000), power=st.sampled_from([0, 1, 3]), constant=st.integers(0, 50)
)
def test_the_largest_is_found_and_few_are_asked_for(limit, most, power, constant):
    asked = []

    def free(size: int) -> int:
        asked.append(size)
        falls = (limit + 0.5) ** power - size**power if power else limit - size + (10**6 if size <= limit else -(10**6))
        return math.floor(1000 * falls) - (constant if size > limit else 0)

    assert largest(free, most) == min(limit, most)
    assert len(asked) == len(set(asked)) and max(asked) <= max(1, 4 * limit)
    assert len(asked) <= (9 if power == 1 else 24)


TABLES = [
    {"name": "gpt", "preset": "1m", "sequence": 16},
    {
        "name": "gpt",
        "vocab_size": 300,
        "sequence": 16,
        "layers": 4,
        "d_model": 64,
        "heads": 4,
        "kv_heads": 2,
        "d_ff": 100,
    },
    {"name": "bert", "vocab_size": 300, "sequence": 16, "layers": 2, "d_model": 64, "heads": 4},
    {"name": "lstm", "vocab_size": 300, "hidden": 2 * STEP, "embedding": 2 * STEP},
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["name"])
def test_members_of_a_family_grow_and_the_model_is_one_of_them(table):
    values = build(table).values
    found = family(table, values)
    counts = [sum(p.numel() for p in build(found.member(size)).factory().parameters()) for size in (1, 2, 3, 4)]
    assert counts == sorted(set(counts))
    own = {"gpt": 2 if "kv_heads" in table else 4, "bert": 4, "lstm": 2}[table["name"]]
    same = build(found.member(own)).values
    assert {key: value for key, value in same.items() if key != "d_ff"} == {
        key: value for key, value in values.items() if key != "d_ff"
    }


NAMED = {
    "gpt2": "n_layer", "bloom": "n_layer", "ctrl": "n_layer", "mpt": "n_layers", "xglm": "num_layers",
    "bart": "decoder_layers", "prophetnet": "num_decoder_layers", "opt": "num_hidden_layers",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "depth"), NAMED.items())
def test_the_number_of_blocks_has_many_names(kind, depth):
    """Of a GPT-2 no largest model was found, and a deep one was run block by block. A table may give it by the name
    that all configurations of transformers know, too."""
    pytest.importorskip("transformers")
    for more in ({}, {"num_hidden_layers": 5}) if kind in ("gpt2", "mpt") else ({},):
        table = {"name": "hf", "config": {"model_type": kind, **({"num_hidden_layers": 7} if more else {})}, **more}
        values = build(table).values
        found = family(table, values)
        assert found is not None and found.depth == depth and found.own == more.get("num_hidden_layers", values[depth])
        assert build(found.member(found.own)).values == values
        with torch.device("meta"):
            made = build(found.member(3)).factory()
        lists = [each for each in made.modules() if isinstance(each, torch.nn.ModuleList)]
        assert max(map(len, lists)) == 3


def test_there_is_no_family_of_a_model_whose_sizes_are_not_known():
    assert family({"name": "chess"}, {}) is None


def test_dropout_and_lstm_run_dry():
    spec = build({"name": "lstm", "vocab_size": 61, "dropout": 0.1})
    found = dry_run(Subject(spec.factory, causal_lm, text()[0], 4, precision("bf16")))
    assert found.activations > 0 and found.num_parameters == sum(p.numel() for p in spec.factory().parameters())

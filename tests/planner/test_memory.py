"""Predicted bytes are those that a real engine holds: of chunks and optimizer exactly, of activations, loans and
budgets too."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, UserError
from shoal.chunks import activations_on_host
from shoal.chunks.tier import MOVING
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.errors import BudgetExceeded
from shoal.models import GPT, GPTConfig, MoEConfig, build, causal_lm
from shoal.optim.buddy import FOR_BUDDY
from shoal.optim.groups import decay_matrices_only
from shoal.optim.tiers.placement import IN_TURN
from shoal.planner import (
    Machine,
    MemoryNeed,
    Place,
    Prediction,
    Recording,
    Subject,
    dry_run,
    dry_run_stages,
    lay_out_all,
    memory_need,
    optimizer_state,
    predict,
    replay,
)
from shoal.planner.prepare import Untraced
from shoal.precision import precision as precision_named
from tests.exchange import teacher
from tests.parity.cases import CASES, text
from tests.pool import run_ranks

CHUNK = 20_000
MICROBATCH = 4
KEPT = ("weights", "masters", "gradients")
LAST_BATCH_IS_WHOLE = 3
OPTIMIZERS = {
    "adamw": teacher.ADAMW,
    "nadam": partial(torch.optim.NAdam, lr=3e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


def gpt(dropout: float = 0.0) -> GPT:
    return GPT(GPTConfig(vocab_size=61, sequence=12, layers=4, d_model=32, heads=4, tied=True, dropout=dropout))


def untied() -> GPT:
    return GPT(GPTConfig(vocab_size=61, sequence=12, layers=4, d_model=32, heads=4, tied=False))


def moe() -> GPT:
    return GPT(GPTConfig(vocab_size=61, sequence=12, layers=2, d_model=32, heads=4, moe=MoEConfig(4)))


_recordings: dict[tuple[Any, ...], Recording] = {}


def run_dry(
    precision, recompute="none", model=gpt, microbatch=MICROBATCH, tp=1, cp=1, ep=1, context="ulysses"
) -> Recording:
    plan = Plan(recompute=recompute, tp=tp, cp=cp, dp=ep, ep=ep, context=context)
    key = model, microbatch, repr((precision, plan))
    if key not in _recordings:
        groups = decay_matrices_only(0.1)
        subject = Subject(model, causal_lm, text()[0], microbatch, precision_named(precision), plan, groups)
        _recordings[key] = dry_run(subject)
    return _recordings[key]


def predicted(plan: Plan, precision, optimizer, place: Place, chunk: int = CHUNK, model=gpt) -> MemoryNeed:
    recording, kind = (
        run_dry(precision, plan.recompute, model, tp=plan.tp, cp=plan.cp, ep=plan.ep, context=plan.context),
        precision_named(precision),
    )
    state = optimizer_state(
        OPTIMIZERS[optimizer], recording.options, kind, place.together > 1 or plan.memory is not None
    )
    chunks = lay_out_all(recording.parameters, plan, place, kind, state.whole_parameters, chunk)
    return memory_need(recording, chunks, plan, place, kind, state, -(-3 // plan.dp))


def held(world: World | None, plan: Plan, precision, optimizer, model=gpt, chunk: int | None = CHUNK) -> dict:
    """What an engine holds after three steps, and the most that its tier and its executor saw."""
    exchange = {"name": "allreduce"} | ({} if chunk is None else {"chunk_bytes": chunk})
    plan = Plan(**{**plan.to_dict(), "exchange": exchange})
    running = Engine(
        model, causal_lm, OPTIMIZERS[optimizer], plan, global_batch=12, microbatch=MICROBATCH, precision=precision,
        world=world, param_groups=decay_matrices_only(0.1),
    )  # fmt: skip
    try:
        for batch in running.batches(text(), steps=LAST_BATCH_IS_WHOLE):
            running.step(batch)
        return {
            "kept": sum(chunk.nbytes for chunk in running.parts.chunks),
            "state": sum(each.nbytes for each in running.optimizer.state_tensors().values()),
            "buffers": sum(each.nbytes for each in running.module.buffers()),
            "tier": None if running.parts.tier is None else dict(running.parts.tier.most),
            "in all": None if running.parts.tier is None else running.parts.tier.most_in_all,
            "executor": None if running.parts.gather is None else running.parts.gather.executor.most,
            "chunk_bytes": running.parts.chunk_bytes,
            "buddy": 0 if running.parts.buddy is None else kept_elsewhere(running.world, running.parts.buddy.nbytes),
        }
    finally:
        running.close()


def kept_elsewhere(world: World, kept_here: int) -> int:
    """Bytes that its buddy, the next rank, keeps of this one."""
    return world.everyone.all_gather_object(kept_here)[(world.rank + 1) % world.size]


def smallest(plan: Plan, precision, optimizer, model=gpt) -> int:
    memory = {**(plan.memory or {}), "device": 1000}
    with pytest.raises(BudgetExceeded) as failure:
        held(None, Plan(**{**plan.to_dict(), "memory": memory}), precision, optimizer, model)
    return failure.value.needed


def check(need: MemoryNeed, real: dict) -> None:
    assert sum(need.of(role) for role in KEPT) == real["kept"]
    assert need.of("optimizer state") == real["state"]
    assert need.of("buffers") == real["buffers"]
    assert need.of(FOR_BUDDY) == real["buddy"]
    if real["tier"] is not None:
        assert need.of("gradients on loan") == real["tier"]["gradients on loan"]
        assert need.of(MOVING) == real["tier"][MOVING] == real["executor"]
        assert need.of("activations") == pytest.approx(real["tier"]["activations"], rel=0.02)


PRECISIONS = ["fp32", "fp16", "bf16", *({"name": "bf16", "master": keep} for keep in ("split", "kahan", "stochastic"))]


@pytest.mark.parametrize("memory", [None, {}], ids=["whole", "memory"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_one_process_in_every_precision(precision, memory):
    plan = Plan(memory=memory)
    check(predicted(plan, precision, "adamw", Place()), held(None, plan, precision, "adamw"))


@pytest.mark.parametrize("optimizer", ["nadam", "sgd", "adafactor"])
def test_other_optimizers(optimizer):
    for plan in (Plan(), Plan(memory={})):
        check(predicted(plan, "fp32", optimizer, Place()), held(None, plan, "fp32", optimizer))


RECOMPUTE = ["none", "full", {"name": "blocks", "every": 2}, {"name": "selective"}]
RECOMPUTE += [{"name": "blocks", "full": 1, "selective": [3]}, {"name": "budget", "keep": 0.6}]


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_recompute_and_dropout(recompute):
    plan, model = Plan(memory={}, recompute=recompute), partial(gpt, dropout=0.1)
    need = predicted(plan, "bf16", "adamw", Place(), model=model)
    real = held(None, plan, "bf16", "adamw", model)
    # its first step keeps less: the most of the tier is of another step than the replayed loans
    if recompute == RECOMPUTE[-1]:
        assert need.of("activations") == pytest.approx(real["tier"]["activations"], rel=0.02)
    else:
        check(need, real)
        assert need.least == smallest(plan, "bf16", "adamw", model)


HF = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
}
MODELS = [
    {
        "name": "gpt",
        "preset": "1m",
        "d_model": 32,
        "positions": "rotary",
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "bias": False,
    },
    {"name": "lstm", "vocab_size": 61, "embedding": 64, "hidden": 32, "dropout": 0.1},
    {"name": "hf", "config": {**HF, "vocab_size": 61}},
]


@pytest.mark.parametrize("table", MODELS, ids=lambda table: table["name"])
def test_other_models(table):
    if table["name"] == "hf":
        pytest.importorskip("transformers")
    plan, model = Plan(memory={}), build(table).factory
    need = predicted(plan, "bf16", "adamw", Place(), model=model)
    check(need, held(None, plan, "bf16", "adamw", model))
    assert need.least == pytest.approx(smallest(plan, "bf16", "adamw", model), rel=0.02)


def test_the_smallest_budget_is_the_one_that_the_engine_asks_for():
    for precision in ("fp32", "bf16"):
        assert predicted(Plan(memory={}), precision, "adamw", Place()).least == smallest(Plan(), precision, "adamw")


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_activations_that_wait_on_the_host_are_not_in_the_budget(share, recompute, monkeypatch):
    """What an engine asks for depends on what has left already: at most as much as is predicted, and not much less."""
    monkeypatch.setattr(activations_on_host, "WORTH", 256)
    monkeypatch.setattr(replay, "WORTH", 256)
    plan = Plan(memory={"activations": share}, recompute=recompute)
    need = predicted(plan, "fp32", "adamw", Place()).least
    assert smallest(plan, "fp32", "adamw") == pytest.approx(need, rel=0.1)
    if recompute == "none":  # of what is computed again the little that stays is not worth the way
        assert need < predicted(Plan(memory={}), "fp32", "adamw", Place()).least


def test_pages_that_are_streamed_are_in_the_budget():
    plan = Plan(memory={"update": "streamed"})
    need = predicted(plan, "bf16", "adamw", Place())
    in_turn = held(None, plan, "bf16", "adamw")["tier"][IN_TURN]
    assert need.of(IN_TURN) == pytest.approx(in_turn, abs=CHUNK)
    streamed, plain = smallest(plan, "bf16", "adamw"), smallest(Plan(memory={}), "bf16", "adamw")
    assert need.least - need.of(IN_TURN) == streamed - in_turn == plain


def test_a_gpu_that_measures_where_to_update_may_need_more():
    recording = run_dry("bf16", microbatch=12)
    chunk = {"name": "allreduce", "chunk_bytes": CHUNK}

    def of(update: str, device: int | None) -> MemoryNeed:
        plan = Plan(memory={"update": update}, exchange=chunk)
        machine = Machine(1 << 34, device)
        return predict(recording, OPTIMIZERS["adamw"], plan, precision_named("bf16"), machine, 1).need

    deferred, auto, streamed = (of(update, 1 << 34) for update in ("deferred", "auto", "streamed"))
    assert auto.rows == streamed.rows and auto.total("device") > deferred.total("device")
    assert auto.of("gradients") == 2 * deferred.of("gradients") and deferred.of(IN_TURN) == 0 < auto.of(IN_TURN)
    assert of("auto", None).rows == of("deferred", None).rows, "a CPU updates there"


TWO_RANKS = [
    *({"zero": stage} for stage in range(4)),
    {"zero": 2, "precision": {"name": "bf16", "master": "split"}},
    {"zero": 1, "optimizer": "adafactor"},
    {"zero": 3, "buddy": 1},
    {"zero": 2, "memory": {}, "buddy": 1},
    {"zero": 0, "memory": {}},
    {"zero": 2, "memory": {}},
    {"zero": 3, "memory": {}, "precision": "bf16"},
]


def case(options: dict) -> tuple[Plan, object, str]:
    options = dict(options)
    precision, optimizer = options.pop("precision", "fp32"), options.pop("optimizer", "adamw")
    return Plan(**{"dp": 2, **options}), precision, optimizer


def held_by_rank(world: World, options: dict) -> dict:
    plan, precision, optimizer = case(options)
    return held(world, plan, precision, optimizer, moe if plan.ep > 1 else untied if plan.pp > 1 else gpt)


@pytest.mark.parametrize("options", TWO_RANKS, ids=str)
def test_two_ranks_of_one_host(options):
    plan, precision, optimizer = case(options)
    for rank, real in enumerate(run_ranks(held_by_rank, 2, options)):
        place = Place(rank, 2 if plan.zero else 1, 2, True)
        check(predicted(plan, precision, optimizer, place), real)


CUT = [
    {"tp": 2, "dp": 1},
    {"tp": 2, "dp": 1, "memory": {}, "precision": "bf16"},
    {"tp": 2, "zero": 1},
    {"tp": 2, "zero": 1, "buddy": 1},
    {"ep": 2, "zero": 1, "buddy": 1},
    {"cp": 2, "dp": 1, "memory": {}},
    {"cp": 2, "dp": 1, "zero": 2, "memory": {}, "context": "ring"},
    {"ep": 2, "zero": 1},
    {"ep": 2, "dp": 4, "zero": 2},
    {"ep": 2, "memory": {}, "precision": "bf16"},
]


@pytest.mark.parametrize("options", CUT, ids=str)
def test_the_first_rank_of_a_model_that_is_cut(options):
    plan, precision, optimizer = case(options)
    real = run_ranks(held_by_rank, plan.size, options)[0]
    together = plan.dp * plan.cp if plan.zero else 1
    place = Place(0, together, plan.size, True, with_experts=max(1, together // plan.ep))
    check(predicted(plan, precision, optimizer, place, model=moe if plan.ep > 1 else gpt), real)
    assert run_dry(precision, tp=2).num_parameters == run_dry(precision).num_parameters


STAGES = [
    {"pp": 2, "dp": 1},
    {"pp": 2, "dp": 1, "schedule": "gpipe", "memory": {}, "precision": "bf16"},
    {"pp": 2, "dp": 1, "schedule": "zbv"},
    {"pp": 2, "dp": 1, "buddy": 1},
    {"pp": 2, "dp": 2, "zero": 1, "schedule": "interleaved"},
    {"pp": 2, "dp": 1, "schedule": "interleaved", "memory": {}},
    {"pp": 2, "dp": 1, "schedule": "zb1p", "memory": {}},
    {"pp": 2, "dp": 2, "zero": 2, "schedule": "zbv", "memory": {}},
    {"pp": 2, "dp": 1, "recompute": "full", "memory": {}},
    {"pp": 2, "dp": 1, "recompute": {"name": "blocks", "full": "0, 3", "selective": [1]}, "memory": {}},
    {"pp": 2, "dp": 1, "schedule": "2bw"},
    {"pp": 2, "dp": 1, "schedule": "2bw", "precision": "bf16"},
    {"pp": 2, "tp": 2, "dp": 1, "memory": {}},
]


@pytest.mark.parametrize("options", STAGES, ids=str)
def test_every_rank_of_a_pipeline(options):
    plan, precision, optimizer = case(options)
    together = plan.dp if plan.zero else 1
    for place, real in enumerate(run_ranks(held_by_rank, plan.size, options)[:: plan.size // 2]):
        subject = Subject(
            untied, causal_lm, text()[0], MICROBATCH, precision_named(precision), plan, decay_matrices_only(0.1)
        )
        recording = dry_run(replace(subject, rank=place * plan.size // 2))
        kind = precision_named(precision)
        state = optimizer_state(OPTIMIZERS[optimizer], recording.options, kind, together > 1 or plan.memory is not None)
        where = Place(0, together, plan.size, True)
        chunks = lay_out_all(recording.parameters, plan, where, kind, state.whole_parameters, CHUNK)
        check(memory_need(recording, chunks, plan, where, kind, state, -(-3 // plan.dp)), real)


def test_a_stage_uses_no_more_weights_together_than_one_process():
    def together(events) -> int:
        return max(len(value) for what, value in events if what == "use")

    subject = Subject(untied, causal_lm, text()[0], MICROBATCH, precision_named("fp32"), Plan(pp=2, memory={}))
    stages = dry_run_stages(subject).stages
    assert {together(each.events) for each in stages} == {together(run_dry("fp32", model=untied).events)}


@pytest.mark.parametrize("place", [0, 7])
def test_a_rank_of_a_plan_of_1024_has_and_sends_what_the_formula_says(place):
    """tp = 8 of dp 128: a vocabulary of 61 leaves the first rank 8 rows, the last 7. Sixteen rows of 12 tokens, 64
    channels, 2 blocks."""
    D, F, V, T, B, blocks, tp = 64, 256, 61, 12, 16, 2, 8

    def model() -> GPT:
        return GPT(GPTConfig(vocab_size=V, sequence=T, layers=blocks, d_model=D, heads=8, tied=True))

    plan, groups = Plan(dp=128, tp=tp), decay_matrices_only(0.1)
    found = dry_run(
        Subject(model, causal_lm, text()[0], B, precision_named("fp32"), plan, groups, rank=8 * 127 + place)
    )
    rows = V // tp + (place < V % tp)
    matrices = blocks * (4 * D * D + 2 * D * F) // tp + rows * D
    vectors = blocks * ((3 * D + F) // tp + 2 * D + 4 * D) + 2 * D + T * D  # biases cut and whole, norms, positions
    assert sum(shape.numel() for _, shape, _ in found.parameters) == matrices + vectors
    assert found.num_parameters == blocks * (4 * D * D + 2 * D * F + 3 * D + F + 6 * D) + V * D + 2 * D + T * D
    padded = -(-T // tp) * tp  # 12 tokens among 8 ranks: each sends as many as the first
    assert found.sent["activations"] == 2 * (4 * blocks + 2) * B * padded * D * 4
    assert found.sent["logits"] == 3 * B * T * 4


@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_experts_of_a_plan_of_1024_ranks_have_and_send_what_the_formula_says(rank):
    """Four experts of width 128 over ep 4 of dp 512, each cut between two ranks; 16 rows of 12 tokens, two experts
    each, 32 channels, 2 blocks."""
    plan, D, F, E, blocks, pairs = Plan(dp=512, tp=2, ep=4), 32, 128, 4, 2, 16 * 12 * 2
    found = dry_run(
        Subject(moe, causal_lm, text()[0], 16, precision_named("fp32"), plan, decay_matrices_only(0.1), rank=rank)
    )
    experts = sum(shape.numel() for name, shape, _ in found.parameters if ".experts." in name)
    assert experts == blocks * E * 2 * D * F // (plan.ep * plan.tp)
    numbers = blocks * E * 8  # how many rows come of each expert
    assert found.sent["experts"] == 4 * blocks * pairs * D * 4 + numbers  # out and back, forward and backward


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "plan", [{"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"cp": 2, "tp": 2, "ep": 2, "recompute": "full"}], ids=str
)
def test_capacity_and_biases_run_dry(plan, precision):
    case, plan = CASES["moe-capacity"], Plan(**plan)
    found = dry_run(Subject(case.factory, case.loss, text()[0], 2, precision_named(precision), plan))
    assert found.sent["experts"] > 0 and found.activations > 0


def test_weights_that_pass_between_hosts():
    options = {"zero": 3}
    for rank, real in enumerate(simulate_world(2, held_by_rank, options)):
        need = predicted(case(options)[0], "fp32", "adamw", Place(rank, 2, 1, False))
        check(need, real)
        assert 0 < real["executor"] <= need.of(MOVING)


def deep(layers: int) -> GPT:
    return GPT(GPTConfig(vocab_size=61, sequence=12, layers=layers, d_model=32, heads=4, tied=False))


def most_in_use(world: World, options: dict) -> int:
    return held(world, Plan(**options), "fp32", "adamw", partial(deep, 6), chunk=64)["executor"]


def test_weights_of_layers_that_ranks_divide_go_after_their_block_has_run_again():
    """Those with biases that are added last stayed until the end of the backward, more of them with each block."""
    options = {"dp": 2, "tp": 2, "zero": 3, "recompute": "full"}
    few, more = (
        predicted(Plan(**options), "fp32", "adamw", Place(0, 2, 1, False), 64, partial(deep, layers)).of(MOVING)
        for layers in (3, 6)
    )
    assert few == more
    assert all(most <= more for most in simulate_world(4, most_in_use, options))


@pytest.mark.parametrize("options", [{}, {"dp": 2, "zero": 3}, {"recompute": "full"}], ids=str)
def test_without_a_limit_of_the_device_weights_stay_that_have_come(options):
    plan = Plan(memory={}, **options)
    for rank, real in enumerate(run_ranks(held_by_rank, plan.size, {"dp": 1, "memory": {}, **options})):
        need = predicted(plan, "fp32", "adamw", Place(rank, plan.dp, plan.dp, True))
        assert need.total("device") - need.of("buffers") == real["in all"] > need.least


@pytest.mark.parametrize("memory", [{}, {"device": 500_000}, {"device": 700_000}], ids=str)
def test_chunks_are_as_large_as_the_engine_makes_them(memory):
    from shoal.planner.layout import chosen_chunk

    plan, kind, recording = Plan(memory=memory), precision_named("fp32"), run_dry("fp32")
    place = Place(budget=memory.get("device"))
    size = chosen_chunk(recording.parameters, plan, place, kind, False, None, 12345)
    assert held(None, plan, "fp32", "adamw", chunk=None)["chunk_bytes"] == size


@pytest.mark.parametrize("precision", ["fp32", "bf16", {"name": "bf16", "master": "split"}], ids=str)
@pytest.mark.parametrize("host", [None, 700_000, 1_000_000], ids=str)
def test_pages_on_the_disk(tmp_path, precision, host):
    disk = {"path": str(tmp_path)}
    memory = {"disk": disk} if host is None else {"disk": disk, "host": host}
    plan = Plan(memory=memory, exchange={"name": "allreduce", "chunk_bytes": CHUNK})
    running = Engine(gpt, causal_lm, OPTIMIZERS["adamw"], plan, global_batch=12, microbatch=4, precision=precision)
    need, tier = predicted(plan, precision, "adamw", Place()), running.parts.host.held
    try:
        roles = ("weights", "masters", "gradients", "optimizer state", "optimizer state in turn")
        on_host = {
            role: sum(row.nbytes for row in need.rows if (row.role, row.tier) == (role, "host")) for role in roles
        }
        assert on_host == {role: pytest.approx(tier.get(role, 0), abs=2 * CHUNK) for role in roles}, (
            "counts of steps, padding: a chunk"
        )
        files = sum(path.stat().st_size for path in tmp_path.glob("rank-0/*.[ab]"))
        assert need.total("disk") == pytest.approx(files, rel=0.2) and (files == 0) == (need.total("disk") == 0)
    finally:
        running.close()


def test_temporaries_by_hand():
    """y = tanh(x w): saved are x, w's place and y; beside them live, at the dearest moment, the sum's gradient and
    those of y and xw."""

    class Tanh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(8, 16))

        def forward(self, x):
            return (x @ self.w).tanh()

    def loss(model, microbatch):
        return model(microbatch["x"]).sum(), torch.tensor(4)

    found = dry_run(Subject(Tanh, loss, {"x": torch.zeros(8)}, 4, precision_named("fp32")))
    x, y, w = 4 * 4 * 8, 4 * 4 * 16, 4 * 8 * 16
    assert found.activations == x + y
    assert w <= found.temporaries <= w + y + 64
    assert found.num_parameters == 128 and [kind for kind, _ in found.events].count("came") == 1


def of_a_missing_file() -> nn.Module:
    with open("no such file", encoding="utf-8") as file:
        return nn.Linear(*json.load(file))


def of_no_such_name() -> nn.Module:
    json.loads("{")
    return nn.Linear(2, 3)


@pytest.mark.parametrize(
    ("factory", "line", "said"),
    [
        (lambda: nn.Linear(2, -3), 0, "RuntimeError"),
        (of_a_missing_file, 1, "FileNotFoundError"),
        (of_no_such_name, 1, "JSONDecodeError"),
    ],
)
def test_a_model_that_cannot_be_made_is_told_in_one_line_by_the_users_own(factory, line, said):
    """It was said that it cannot be run without computing it, and `auto_plan` answered all the same."""
    with pytest.raises(UserError) as error:
        dry_run(Subject(factory, causal_lm, text()[0], 4, precision_named("fp32")))
    own = f"{__file__}:{factory.__code__.co_firstlineno + line}: "
    assert str(error.value).startswith(f"the model cannot be made: its factory raises {said} at {own}")
    assert "\n" not in str(error.value) and not isinstance(error.value, Untraced)


def test_the_budget_that_is_asked_for_is_enough_for_the_chunks_that_it_brings():
    """Under a small budget chunks are small; under what these ask for the engine takes larger ones, which need more."""
    recording, plan = run_dry("fp32", microbatch=64), Plan(memory={"device": 1000})

    def of(plan: Plan) -> Prediction:
        return predict(recording, OPTIMIZERS["adamw"], plan, precision_named("fp32"), Machine(1 << 34), 1)

    tiny = of(plan)
    assert tiny.smallest is not None and tiny.fits[0].needed == tiny.smallest
    enough = of(Plan(memory={"device": tiny.smallest}))
    assert enough.chunk_bytes > tiny.chunk_bytes and enough.fits[0].free >= 0
    assert enough.smallest is not None and enough.smallest <= tiny.smallest
    assert of(Plan(memory={"device": enough.smallest})).fits[0].free >= 0

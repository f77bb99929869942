"""The collectives that the search counts are those of the engine's chunks, and of its ballots."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from shoal import Engine, Plan
from shoal.assembly.recipe import Recipe
from shoal.chunks.assign import ChunkKey, assign
from shoal.comm import World
from shoal.comm.ledger import Flow, Traffic
from shoal.exchange.tuning import SMALLEST, USUAL_CHUNK, best_size
from shoal.models import ModelSpec, build
from shoal.planner import Subject
from shoal.planner.ask import numbers_of
from shoal.planner.cluster import Link
from shoal.planner.degrees import Spread
from shoal.planner.exchanges import MOST_CHUNKS, agreed, chunks, met
from shoal.planner.measure import here
from shoal.planner.pipes import placed, slowest
from shoal.planner.profile import profile
from shoal.planner.rehearsal import rehearse
from shoal.planner.search import Search
from shoal.planner.task import Choice, Task
from shoal.precision import precision
from tests.parity.cases import CASES
from tests.pool import run_ranks

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("cache_of_its_own")]
GPT = {"name": "gpt", "layers": 2, "d_model": 16, "heads": 2, "vocab_size": 64, "sequence": 8}
ROW = {"input_ids": torch.zeros(8, dtype=torch.int64), "labels": torch.zeros(8, dtype=torch.int64)}


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def sent_in_a_step(
    model: ModelSpec, whole: Plan, row: dict[str, Any] = ROW, rank: int = 0, **own: Any
) -> Mapping[Flow, Traffic]:
    """What the engine of `rank` sends, by flow, in the second step of two: the first agrees on names, and those that
    follow send the same."""
    given = {each: known.default for each, known in inspect.signature(Engine.__init__).parameters.items()}
    given |= {"loss": model.loss, "optimizer": sgd, **own}
    rows = [row] * (2 * own["global_batch"])
    return rehearse(model.factory, Recipe.taken_from(given), whole, rows, rank=rank, steps=2)[-1].traffic


def sent(world: World, zero: int) -> int:
    """Bytes that a step of two microbatches hands to collectives, but for the ballot."""
    model = build(GPT)
    engine = Engine(
        model.factory, model.loss, sgd, Plan(dp=world.size, zero=zero), global_batch=8, microbatch=2, world=world
    )
    told = list[int]()
    for batch in engine.batches([ROW] * 8, steps=2):
        engine.step(batch)
        told.append(sum(of.payload for flow, of in world.ledger.traffic.items() if flow.purpose != "ballot"))
    engine.close()
    return told[1] - told[0]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_of_a_host_send_what_is_counted(zero):
    model, numbers = build(GPT), precision("fp32")
    traced = profile(Subject(model.factory, model.loss, ROW, 1, numbers), {})
    task = Task(traced, here(2, 2, torch.float32), 8, numbers_of(numbers, sgd))
    counted = Search(task).estimate(Choice(Spread(copies=2), 2, zero=zero)).wire["copies"]
    assert run_ranks(sent, 2, zero) == [pytest.approx(counted, rel=0.01)] * 2  # chunks end at whole lines


IMAGE = {"inputs": torch.zeros(3, 8, 8), "labels": torch.tensor(0)}
MODELS = {"gpt": (GPT, ROW), "resnet": ({"name": "resnet", "depth": 18, "classes": 10}, IMAGE)}
BALLOTS = ("ballot", "norm")
"""Purposes of the calls by which ranks agree."""
ROUNDS = {"all_reduce": 2, "all_gather": 1}
"""Messages that follow each other in such a call of two ranks."""


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("gpt", {"dp": 2}),
        ("gpt", {"dp": 2, "zero": 2}),
        ("gpt", {"tp": 2}),
        ("gpt", {"dp": 2, "pp": 2}),
        ("resnet", {"dp": 2}),
        ("resnet", {"dp": 2, "pp": 2}),
    ],
    ids=str,
)
def test_ranks_agree_by_as_many_calls_as_are_counted(name, plan):
    table, row = MODELS[name]
    model, numbers, whole = build(table), precision("fp32"), Plan(**plan)
    traced = profile(Subject(model.factory, model.loss, row, 1, numbers), {"parts": (2,)})
    cluster = here(whole.size, whole.size, torch.float32)
    steps = Link(1.0, inf)  # a second a message, whatever it carries
    host = replace(cluster.hosts[0], inside=steps, device=replace(cluster.hosts[0].device, launch=0.0))
    task = Task(traced, replace(cluster, hosts=(host,), between=steps), 8, numbers_of(numbers, sgd))
    spread = Spread(copies=whole.dp, parts=whole.tp, stages=whole.pp)
    counted = agreed(Search(task).prices, Choice(spread, 4, zero=whole.zero), 1, computing=0.0)
    traffic = sent_in_a_step(model, whole, row, global_batch=8, microbatch=4, clip=1.0)
    agreeing = [(flow, of.calls) for flow, of in traffic.items() if flow.purpose in BALLOTS]
    assert counted == sum(ROUNDS[flow.operation] * calls for flow, calls in agreeing) > 0


@pytest.mark.parametrize(("plan", "tied"), [({"pp": 2}, True), ({"pp": 4}, False)], ids=str)
def test_stages_send_what_is_counted(plan, tied):
    model, numbers, whole = build({**GPT, "layers": 4, "tied": tied}), precision("bf16"), Plan(**plan)
    traced = profile(Subject(model.factory, model.loss, ROW, 1, numbers), {})
    task = Task(traced, here(whole.size, whole.size, torch.bfloat16), 8, numbers_of(numbers, sgd))
    choice = Choice(Spread(copies=whole.dp, stages=whole.pp), 2, schedule="1f1b")
    searched = Search(task)
    estimate = searched.simulated(searched.estimate(choice))
    rank = slowest(estimate.stages, placed(whole.pp, len(estimate.stages)))[0] * whole.dp
    traffic = sent_in_a_step(model, whole, rank=rank, global_batch=8, microbatch=2, precision="bf16")
    sends = {flow: of.payload for flow, of in traffic.items() if flow.purpose not in BALLOTS}
    found = sum(of for flow, of in sends.items() if flow.operation != "recv" and flow.group != "dp")  # replicas: one
    assert sum(estimate.wire.values()) == pytest.approx(found, rel=0.01), sends
    other = choice._replace(schedule="zbv")
    assert (met(searched.prices, choice)[0] > 0) == tied and met(searched.prices, other)[0] == 0


@pytest.mark.parametrize(
    ("plan", "recompute"),
    [
        ({"tp": 2}, "none"),
        ({"tp": 2}, "selective"),
        ({"tp": 2}, "full"),
        ({"cp": 2}, "selective"),
        ({"cp": 2, "context": "ring"}, "selective"),
    ],
    ids=str,
)
def test_what_blocks_send_again_is_counted(plan, recompute):
    """Of a selective recompute nothing was: its products are kept, and not what came of collectives."""
    model, numbers, whole = build(GPT), precision("fp32"), Plan(**plan, recompute=recompute)
    traced = profile(Subject(model.factory, model.loss, ROW, 1, numbers), {"parts": (2,), "tokens": (2,), "ring": (2,)})
    cluster = here(2, 2, torch.float32)
    task = Task(traced, cluster, 8, numbers_of(numbers, sgd), recompute=(recompute,))
    search = Search(task)
    estimate = search.simulated(search.estimate(Choice(Spread.of(whole), 4)))
    traffic = sent_in_a_step(model, whole, global_batch=8, microbatch=4)
    sent = sum(of.payload for flow, of in traffic.items() if flow.purpose in ("activations", "logits", "attention"))
    assert sum(value for what, value in estimate.wire.items() if what != "copies") == pytest.approx(sent)


@pytest.mark.parametrize("plan", [{"tp": 2}, {"cp": 2, "recompute": "full"}, {"pp": 2}], ids=str)
def test_a_last_microbatch_is_counted_with_the_rows_that_it_has(plan):
    """Of 10 rows in microbatches of 4 it has 2: a step was predicted as one of 12."""
    model, numbers, whole = build({**GPT, "tied": False}), precision("fp32"), Plan(**plan)
    traced = profile(Subject(model.factory, model.loss, ROW, 1, numbers), {"parts": (2,), "tokens": (2,)})
    policy = str(plan.get("recompute", "none"))
    search = Search(Task(traced, here(2, 2, torch.float32), 10, numbers_of(numbers, sgd), 4, recompute=(policy,)))
    estimate = search.simulated(search.estimate(Choice(Spread.of(whole), 4, schedule="1f1b")))
    traffic = sent_in_a_step(model, whole, global_batch=10, microbatch=4)
    kinds = ("activations", "logits", "attention", "forward", "backward")
    sent = sum(of.payload for flow, of in traffic.items() if flow.operation != "recv" and flow.purpose in kinds)
    assert estimate.microbatches == 3
    assert sum(value for what, value in estimate.wire.items() if what != "copies") == pytest.approx(sent), traffic
    if not whole.pipelined:
        even = replace(search.task, rows=12)
        longer = Search(even).estimate(estimate.choice)
        assert estimate.terms["compute"] < longer.terms["compute"]


def sent_to_experts(world: World, recompute: str) -> int:
    """Bytes of tokens that a step of two microbatches hands to the ranks of its experts."""
    case, plan = CASES["moe"], Plan(dp=2, ep=2, recompute=recompute)
    engine = Engine(case.factory, case.loss, sgd, plan, global_batch=8, microbatch=2, world=world)
    for batch in engine.batches([ROW] * 8, steps=1):
        engine.step(batch)
    engine.close()
    return sum(of.payload for flow, of in world.ledger.traffic.items() if flow.purpose == "experts")


def test_tokens_that_blocks_send_again_to_experts_are_counted():
    """How many go to a rank is known of no model before it runs, but how many times as many as without recompute."""
    case, numbers = CASES["moe"], precision("fp32")
    traced = profile(Subject(case.factory, case.loss, ROW, 1, numbers), {"experts": (2,)})
    counted, found = {}, {}
    for policy in ("none", "selective", "full"):
        task = Task(traced, here(2, 2, torch.float32), 8, numbers_of(numbers, sgd), recompute=(policy,))
        search = Search(task)
        choice = Choice(Spread.of(Plan(dp=2, ep=2, recompute=policy)), 2)
        counted[policy] = search.simulated(search.estimate(choice)).wire["experts"]
        found[policy] = sum(run_ranks(sent_to_experts, 2, policy))
    for policy in ("selective", "full"):
        assert found[policy] > 1.4 * found["none"]
        assert counted[policy] / counted["none"] == pytest.approx(found[policy] / found["none"], rel=0.01)


LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 8, "vocab_size": 64,
}  # fmt: skip


def test_what_adapters_send_is_counted():
    """The input of the first block has no gradient, so in backward it sends less than the others."""
    table = {"name": "hf", "config": LLAMA, "lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}
    model, numbers, whole = build(table), precision("fp32"), Plan(tp=2)
    traced = profile(Subject(model.factory, model.loss, ROW, 1, numbers), {"parts": (2,)})
    search = Search(Task(traced, here(2, 2, torch.float32), 8, numbers_of(numbers, sgd)))
    estimate = search.simulated(search.estimate(Choice(Spread.of(whole), 4)))
    traffic = sent_in_a_step(model, whole, global_batch=8, microbatch=4)
    sent = sum(of.payload for flow, of in traffic.items() if flow.purpose in ("activations", "logits"))
    assert estimate.wire["parts"] == pytest.approx(sent)


FAST, SLOW = Link(1e-4, 4e10), Link(1e-4, 3e9)


def cut(table: dict, link: Link, ranks: int) -> tuple[int, int]:
    """Bytes of gradients, and the chunks that the engine cuts: matrices, and what has no weight decay."""
    with torch.device("meta"):
        module = build({"name": "gpt", **table}).factory()
    named = list(module.named_parameters())
    gradients = 4 * sum(each.numel() for _, each in named)
    shortest, long = (link.seconds("all_reduce", nbytes, ranks) for nbytes in (0, 2**26))
    size = best_size(shortest, 2**26 / (long - shortest), gradients) if gradients > SMALLEST else USUAL_CHUNK
    keys = (ChunkKey(each.dtype, "", int(each.dim() >= 2), True) for _, each in named)
    described = [(name, each.shape, key) for (name, each), key in zip(named, keys, strict=True)]
    return gradients, len(assign(reversed(described), size, 4))


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_chunks_of_small_models_are_counted(link, ranks):
    for table in (
        {"layers": 1, "d_model": 16, "heads": 2, "vocab_size": 257, "sequence": 16},
        {"preset": "1m", "vocab_size": 4096, "sequence": 256},
    ):
        gradients, number = cut(table, link, ranks)
        assert chunks(gradients, link, ranks) == pytest.approx(number, abs=number // 3)


def test_what_is_not_there_is_not_sent():
    assert chunks(0.0, FAST, 8) == chunks(1e6, FAST, 1) == 0 and chunks(1e12, FAST, 8) == MOST_CHUNKS
    assert chunks(1e6, Link(1e-5, 1e29), 8) == chunks(1e6, Link(1e20, 1e9), 8) == 2, "latency is all that they take"

"""What algorithms say that they send, against the bytes that they book when they run; and what the planner makes of
it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.exchange.named import ALGORITHMS, algorithm
from shoal.exchange.sends import Sends
from shoal.models import regression
from shoal.planner.search import Search, search
from shoal.planner.task import Choice, Estimate
from tests.planner.models import cluster, model, task

SIDE, RANKS, STEPS = 128, 4, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "hierarchical": {"ranks_per_host": 2, "codec": "u8"},
    "islands": {"ranks": 2, "across": {"name": "local_sgd", "every": 4}},
    "powersgd": {"rank": 4, "start": 0},
    "topk": {"ratio": 0.05},
    "qadam": {"warmup": 1},
    "onebit_adam": {"warmup": 1},
    "local_sgd": {"every": 4},
    "post_local_sgd": {"every": 4, "start": 0},
    "diloco": {"every": 4},
    "streaming_diloco": {"every": 8, "overlap": 1, "fragments": 2},
}
WITHOUT = ("async_average",)
"""How often it exchanges goes by the clock."""


def option(name: str) -> dict[str, Any]:
    return {"name": name, **SETTINGS.get(name, {})}


def student() -> nn.Module:
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)))


def run(world: World, exchange: Any, zero: int) -> tuple[int, int]:
    """Bytes that a rank has sent in some steps for gradients and weights, without the first, and those that it has
    handed to collectives for it, beside numbers and what ZeRO gathers."""
    torch.set_num_threads(1)
    samples = [{"inputs": torch.randn(SIDE), "targets": torch.randn(SIDE)} for _ in range(8)]
    adam = partial(torch.optim.AdamW, lr=1e-6)
    plan = Plan(dp=world.size, zero=zero, exchange=exchange)
    running = Engine(student, regression, adam, plan, world=world, global_batch=8)
    try:
        sent = []
        for batch in running.batches(samples, steps=1 + STEPS):
            running.step(batch)
            running.parts.exchange.settle()  # what travels beside is booked when it has been sent
            all_of = [(flow, each) for flow, each in running.ledger.traffic.items() if each.payload > 1000 * each.calls]
            counted = [each for flow, each in all_of if not zero or flow.purpose != "weights"]
            sent.append((sum(each.wire for each in counted), sum(each.payload for each in counted)))
        return sent[-1][0] - sent[0][0], sent[-1][1] - sent[0][1]
    finally:
        running.close()


@cache
def sent(name: str, zero: int = 0) -> tuple[int, int]:
    return simulate_world(RANKS, run, option(name), zero)[0]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in WITHOUT])
def test_bytes_are_those_that_are_booked(name: str) -> None:
    said = algorithm(option(name)).sends(RANKS, 4, SIDE)
    share = said.share
    if said.inside_hosts:  # two ranks a host: the exact sum there, and half of the rest between hosts
        share = (0.5 + 0.25 * said.share) / 0.75
    (wire, payload), (of_sum, payload_of_sum) = sent(name), sent("allreduce")
    assert wire / of_sum == pytest.approx(share, rel=0.12, abs=0.005)
    assert payload / payload_of_sum == pytest.approx(said.payload(2), rel=0.12, abs=0.005)


@pytest.mark.parametrize("name", ["allreduce", "bf16", "hierarchical", "topk", "delayed"])
def test_what_zero_sends_is_what_is_booked(name: str) -> None:
    """The exact sum goes in parts then; who makes a whole sum sends as much as without ZeRO."""
    parts = algorithm(option(name)).sends(RANKS, 4, SIDE).in_parts
    assert sent(name, 1)[0] == pytest.approx(sent(name)[0] * (0.5 if parts else 1), rel=0.01)


def estimated(exchange: Any, between: float, zero: int = 0) -> Estimate:
    on = cluster(between=between, inside=max(between, 50e9))
    asked = Search(task(on=replace(on, overlap=0.0), pins={"exchange": exchange}))
    return asked.estimate(Choice(asked.spreads()[0], 1, zero))


def predicted(exchange: Any, between: float) -> float:
    """Seconds of a step that copies wait."""
    return estimated(exchange, between).terms["copies"]


def test_a_pinned_exchange_is_priced_as_it_is() -> None:
    slow = {name: predicted(name, 1e8) for name in ("allreduce", "bf16", "bytegrad", "onebit_adam", "none")}
    assert slow["none"] < slow["onebit_adam"] < slow["bytegrad"] < slow["bf16"] < slow["allreduce"]
    assert slow["bytegrad"] == pytest.approx(slow["allreduce"] / 4, rel=0.1)
    fast = {name: predicted(name, 1e13) for name in ("allreduce", "bytegrad")}
    assert fast["allreduce"] < fast["bytegrad"]  # encoding takes longer than it saves


def test_a_whole_sum_takes_as_long_where_masters_are_cut() -> None:
    """And the exact one half as long, so that what is lossy gains nothing at half of the bytes."""
    exact, lossy = (estimated(name, 1e8, zero=1) for name in ("allreduce", "bf16"))
    assert lossy.terms["copies"] == pytest.approx(exact.terms["copies"], rel=0.1)
    assert lossy.wire["copies"] == exact.wire["copies"]  # there and back, and the part of it and the weights


def test_lossy_exchanges_are_taken_where_they_are_allowed_and_pay() -> None:
    slow = task(on=cluster(between=1e8))
    exact, best = search(slow).best[0], search(replace(slow, exchanges=("allreduce", "bytegrad", "bf16"))).best[0]
    assert exact.choice.exchange == "allreduce" and "exchange" not in exact.choice.plan({}).to_dict()
    assert best.choice.exchange == "bytegrad" and best.choice.plan({}).exchange == "bytegrad"
    assert best.seconds < exact.seconds
    fast = task(on=cluster(between=1e13, inside=1e13), exchanges=("allreduce", "bytegrad"))
    assert search(fast).best[0].choice.exchange == "allreduce"


def test_a_model_without_blocks_has_prices_too() -> None:
    whole = model()
    parts = tuple(replace(part, is_block=False) for part in whole.parts)
    asked = Search(task(profile=replace(whole, parts=parts), pins={"exchange": "powersgd"}))
    assert asked.prices.side == 1.0 and asked.run().best[0].seconds > 0


def test_what_does_not_go_with_an_exchange_is_not_tried() -> None:
    asked = Search(task(exchanges=("allreduce", "local_sgd"), pins={"ep": 1}))
    tried = [choice for spread in asked.spreads() for choice in asked.choices(spread)]
    apart = [each for each in tried if each.exchange == "local_sgd"]
    assert apart and not any(each.zero or each.offload or each.spread.tokens > 1 for each in apart)
    assert all(each.spread.replicas > 1 for each in apart)


def test_the_exact_sum_says_nothing_of_itself() -> None:
    assert algorithm("allreduce").sends(8, 2, 100.0) == Sends(in_parts=True)

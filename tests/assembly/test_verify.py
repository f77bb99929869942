"""Replicas compare what they hold: a bit that flips in one of them is found, under every plan that has replicas."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shoal import Plan
from shoal.errors import CorruptionError, UserError
from shoal.jobs import drill
from shoal.launch.failure import failure_of
from tests.parity.cases import CASES, engine
from tests.pool import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 3},
    "zero2 in two copies": {"dp": 4, "zero": 2, "shard": 2},
    "tp": {"dp": 2, "tp": 2},
    "pp": {"dp": 2, "pp": 2},
    "ep": {"dp": 4, "ep": 2},
    "offload": {"dp": 3, "memory": {}},
}


def flipped(world: Any, case: str, plan: dict[str, Any], precision: str, where: str, rank: int) -> tuple[Any, ...]:
    """Votes between steps; then a bit flips on one rank. Returns what is said, and whether this rank is blamed."""
    running = engine(case, precision, 1, plan=Plan(**plan), world=world)
    vote, said = running.verify(), ""
    for batch in running.batches(CASES[case].data(), steps=4):
        if batch.step == 2 and world.rank == rank:
            drill.flip(running, where, random.Random(5))
        running.step(batch)
        try:
            vote = running.verify()
        except CorruptionError as error:
            said = f"{batch.step}: {error}"
            blamed = not failure_of(error, world.rank).lost_peer
            return said, blamed, vote.compared, vote.alone
    return said, False, vote.compared, vote.alone


@pytest.mark.parametrize(
    "case, plan, precision, where, suspects",
    [
        ("gpt", "dp", "fp32", "weight", [1]),
        ("gpt", "dp", "bf16", "optimizer", [1]),
        ("gpt", "dp", "fp32", "gradient", [1]),
        ("resnet-batchnorm", "dp", "fp32", "weight", [1]),
        ("gpt", "tp", "fp32", "weight", [1, 3]),  # those with other parts of the model are not suspect
        ("gpt-deep", "pp", "fp32", "optimizer", [0, 1]),
        ("moe", "ep", "fp32", "weight", [1]),
        ("gpt", "zero2 in two copies", "bf16", "optimizer", [0, 1, 2, 3]),  # a copy has all its weights from its owners
        ("gpt", "offload", "bf16", "weight", [1]),
    ],
)
def test_a_flipped_bit_is_found_at_the_next_vote(case, plan, precision, where, suspects):
    size = Plan(**PLANS[plan]).size
    told = run_ranks(flipped, size, case, PLANS[plan], precision, where, 1)
    said, _, compared, _ = told[0]
    assert {each[0] for each in told} == {said} and said.startswith("2: after step 3")  # alike on all ranks
    blamed = [rank for rank, each in enumerate(told) if each[1]]
    assert blamed == suspects
    assert ("rank 1 holds other bits" if len(suspects) == 1 else "no majority") in said
    assert compared["optimizer state"] > 0


def undisturbed(world: Any, plan: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    running = engine("gpt", "bf16", 1, plan=Plan(**plan), world=world)
    for batch in running.batches(CASES["gpt"].data(), steps=2):
        running.step(batch)
    vote = running.verify()
    return vote.compared, vote.alone


def test_what_has_no_replica_is_said():
    for compared, alone in run_ranks(undisturbed, 2, {"dp": 2, "zero": 1}):
        assert set(compared) == {"weights"} and set(alone) == {"masters", "optimizer state"}
    for compared, alone in run_ranks(undisturbed, 2, {"dp": 2}):
        assert set(compared) == {"weights", "masters", "optimizer state"} and not alone
    assert not run_ranks(undisturbed, 1, {})[0][0]


def refused(world: Any, plan: dict[str, Any]) -> str:
    try:
        engine("gpt-deep", "fp32", 1, plan=Plan(**plan), world=world).verify()
    except UserError as error:
        return str(error)
    return ""


def test_replicas_that_differ_on_purpose_are_refused_by_name():
    assert all("'decentralized'" in said for said in run_ranks(refused, 2, {"dp": 2, "exchange": "decentralized"}))
    assert all("'2bw'" in said for said in run_ranks(refused, 2, {"pp": 2, "schedule": "2bw"}))

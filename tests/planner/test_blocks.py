"""Recompute by block, and microbatches by replica: what is found is the best of all ways, and runs as it is said."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.module.chosen_blocks import chosen_blocks
from shoal.module.selective import selects
from shoal.planner.cluster import Cluster
from shoal.planner.computing import ATTENTION_REACHES
from shoal.planner.degrees import Spread
from shoal.planner.knapsack import Counts, Kind, front
from shoal.planner.profile import Cut, Profile
from shoal.planner.replicas import Replicas, dealt
from shoal.planner.search import Search, search
from shoal.planner.task import Choice, Estimate
from tests.planner.models import GIB, cluster, model, part, task

KINDS = st.lists(
    st.tuples(st.integers(0, 3), *[st.tuples(st.just(0), st.integers(0, 9), st.integers(0, 9))] * 2), max_size=3
)


@given(KINDS, st.integers(-3, 60))
def test_no_choice_of_blocks_is_cheaper(drawn, need):
    kinds = tuple(Kind(*each) for each in drawn)
    blocks = [kind for kind in kinds for _ in range(kind.number)]
    every = (
        [
            (
                sum(kind.frees[way] for kind, way in zip(blocks, ways, strict=True)),
                sum(kind.costs[way] for kind, way in zip(blocks, ways, strict=True)),
            )
            for ways in product(range(3), repeat=min(len(blocks), 7))
        ]
        if len(blocks) <= 7
        else []
    )
    if not every:
        return
    fits = [cost for frees, cost in every if frees >= need]
    found = front(kinds, 3).cheapest(need)
    assert (found is None) == (not fits)
    if found is not None:
        cost, place = found
        counts = front(kinds, 3).at(place)
        assert cost == min(fits) and [sum(each) for each in counts] == [kind.number for kind in kinds]
        spread = [
            (kind, way, number) for kind, own in zip(kinds, counts, strict=True) for way, number in enumerate(own)
        ]
        assert sum(number * kind.costs[way] for kind, way, number in spread) == cost
        assert sum(number * kind.frees[way] for kind, way, number in spread) >= need


def two_kinds(blocks: int) -> Profile:
    """A model of which every second block keeps three times as much, and works twice as much."""
    plain = model(blocks)
    large = replace(part("", 2e11, 10e6, 96 * 2**20), kind="large")
    parts = [
        replace(large, name=each.name) if each.is_block and place % 2 else each
        for place, each in enumerate(plain.parts)
    ]
    return replace(plain, parts=tuple(parts))


def every_way(asked: Search, choice: Choice) -> list[Estimate]:
    """The estimates of all ways to treat the blocks of each stage, that fit."""
    lane = asked.lane(choice)
    stages: list[list[Counts]] = []
    for blocks in lane.cuts.blocks:
        kinds = [
            [each for each in product(range(len(numbers) + 1), repeat=3) if sum(each) == len(numbers)]
            for _, numbers in blocks
        ]
        stages.append([tuple(each) for each in product(*kinds)])
    found = [asked.priced(choice, list(counts)) for counts in product(*stages)]
    return [each for each in found if each.bytes <= asked.task.most]


CHOICES = [
    ({"pp": 1, "dp": 8}, "1f1b", 1),
    ({"pp": 2, "dp": 4}, "1f1b", 1),
    ({"pp": 2, "dp": 4}, "interleaved", 2),
    ({"pp": 2, "dp": 4}, "gpipe", 1),
    ({"pp": 2, "tp": 4}, "zb1p", 1),
]


@pytest.mark.parametrize("profile", [model(5), two_kinds(4)], ids=["alike", "two kinds"])
@pytest.mark.parametrize(("pins", "schedule", "chunks"), CHOICES, ids=str)
def test_the_blocks_that_are_computed_again_are_the_best_of_all(pins, schedule, chunks, profile):
    asked = Search(task(profile, pins={**pins, "tp": pins.get("tp", 1), "cp": 1}))
    (spread,) = asked.spreads()
    choice = Choice(spread, 2, 1, None, "none", schedule, chunks)
    plain = asked.priced(choice, asked.lane(choice).none()).bytes
    some = 0
    for share in (1.01, 0.93, 0.8, 0.65, 0.5, 0.4):
        tight = Search(replace(asked.task, limit=share * plain))
        ways, found = every_way(tight, choice), tight.estimate(choice)
        assert bool(ways) == (found.bytes <= tight.task.most)
        if ways:
            assert found.seconds == pytest.approx(min(each.seconds for each in ways), rel=1e-12)
            some += found.choice.recompute not in ("none", "full", "selective")
            check_said(found)
    assert some, "none of the limits has blocks treated differently"


def check_said(found: Estimate) -> None:
    """The plan's table treats as many blocks of each stage as the estimate says."""
    option, numbers = found.choice.recompute, [sum(own.values()) for own in found.again]
    if isinstance(option, str):
        assert all(set(own) <= {option} for own in found.again)
        return
    full, some = chosen_blocks(sum(numbers), (), 0, option.get("full", ()), option.get("selective", ()))
    start = 0
    for own, number in zip(found.again, numbers, strict=True):
        here = range(start, start + number)
        assert own.get("full", 0) == len({*full} & {*here}) and own.get("selective", 0) == len({*some} & {*here})
        start += number


def test_a_little_more_memory_is_never_slower():
    seconds = [search(task(on=cluster(memory=(0.5 + 0.05 * more) * GIB))).best[0].seconds for more in range(12)]
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(seconds))
    assert len(set(seconds)) > 4


def test_a_pinned_table_is_priced_as_it_is():
    option = {"name": "blocks", "full": 2, "selective": "4"}
    best = search(task(pins={"pp": 2, "recompute": option})).best[0]
    assert best.choice.recompute == option and best.choice.plan({"recompute": option}).recompute == option
    assert {key: sum(own.get(key, 0) for own in best.again) for key in ("full", "selective")} == {
        "full": 2,
        "selective": 1,
    }


def test_a_recompute_that_keeps_operations_is_told_from_one_that_does_not():
    assert selects("selective") and selects({"name": "selective", "save": []})
    assert selects({"name": "blocks", "full": 2, "selective": "3"})
    for other in ("none", "full", {"name": "blocks", "full": 2, "selective": 0}, {"name": "budget", "keep": 0.5}):
        assert not selects(other)


def test_what_selective_keeps_is_priced_as_its_list_says():
    """A list of one's own was priced as the usual one, in memory and in time."""
    blocks = {"attention": Cut(4e10, {}), "attended": Cut(4 * 2**20, {}), "convolutions": Cut(2.5e10, {})}
    blocks |= {"convolved": Cut(2 * 2**20, {})}
    plain = model(4)
    parts = tuple(replace(each, **blocks) if each.is_block else each for each in plain.parts)
    spread, on = Spread(copies=8), cluster(memory=16 * GIB)

    def priced(recompute):
        search = Search(task(replace(plain, parts=parts), on, pins={"recompute": recompute}))
        estimate = search.estimate(Choice(spread, 4))
        return estimate.memory["activations"], estimate.terms["compute"]

    def saving(*names):
        return priced({"name": "selective", "save": list(names)})

    usual = priced("selective")
    assert saving("matmul", "attention") == usual == priced({"name": "blocks", "selective": 4})
    for name, nbytes in (("matmul", 8), ("attention", 4)):
        (other,) = {"matmul", "attention"} - {name}
        memory, seconds = saving(other)
        assert usual[0] - memory == pytest.approx(4 * 4 * nbytes * 2**20) and seconds > usual[1]
    device = on.hosts[0].device
    attention = 4 * 4 * 4e10 / (device.peak(torch.bfloat16) * device.reaches * ATTENTION_REACHES)
    assert saving("matmul")[1] - usual[1] == pytest.approx(attention, rel=1e-6)
    memory, seconds = saving("matmul", "attention", "convolution")
    assert memory - usual[0] == pytest.approx(4 * 4 * 2 * 2**20) and seconds < usual[1]
    assert Search(task(pins={"recompute": {"name": "selective", "save": ["matmul"]}})).estimate(
        Choice(spread, 4)
    ).choice.recompute == {"name": "selective", "save": ["matmul"]}


def test_a_pinned_budget_is_priced_as_the_engine_chooses_blocks():
    """It was priced as if nothing were computed again."""
    budget = {"name": "budget", "keep": 0.5}
    best = search(task(pins={"pp": 2, "schedule": "1f1b", "recompute": budget})).best[0]
    assert best.choice.recompute == budget
    for own in best.again:  # of 32 MiB of a block two are its input
        number, full = sum(own.values()), own["full"]
        assert 32 * number - 30 * full <= 16 * number < 32 * number - 30 * (full - 1)
    plain, asked = (Search(task(pins={"recompute": each})) for each in ("none", budget))
    choice = Choice(Spread(copies=8), 2)
    one, other = plain.estimate(choice), asked.estimate(choice)
    assert other.memory["activations"] < 0.6 * one.memory["activations"]
    assert other.terms["compute"] > one.terms["compute"]


def uneven(*flops: float, count: int = 1) -> Cluster:
    """Hosts whose devices reach so much."""
    plain = cluster(hosts=1, count=count)
    hosts = [
        replace(plain.hosts[0], device=replace(plain.hosts[0].device, name=f"{each:g}", flops={"bf16": each}))
        for each in flops
    ]
    return replace(plain, hosts=tuple(hosts))


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.lists(
        st.tuples(st.sampled_from([1.0, 1.5, 2.0, 3.7]), st.sampled_from([0.0, 0.4, 2.5])), min_size=2, max_size=3
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_no_deal_is_faster(number, paces, kinds):
    kinds = [kind % len(paces) for kind in kinds]
    replicas = Replicas(((1.0,),) * len(paces), tuple(kinds))

    def ends(each: tuple[int, ...]) -> float:
        return max(
            many * paces[kind][0] + paces[kind][1] if many else 0.0 for many, kind in zip(each, kinds, strict=True)
        )

    ways = (each for each in product(range(number + 1), repeat=len(kinds)) if sum(each) == number)
    found = dealt(number, paces, replicas)
    pace, once = paces[found.slowest]
    assert found.number * pace + once == pytest.approx(min(map(ends, ways)))
    if found.shares:
        common = number / sum(found.shares)
        assert ends(tuple(round(share * common) for share in found.shares)) == pytest.approx(found.number * pace + once)


def test_a_fast_host_has_more_microbatches():
    asked = task(model(2), uneven(1e13, 3e13), rows=16, microbatch=1, pins={"pp": 1, "tp": 1, "cp": 1, "zero": 1})
    best = search(asked).best[0]
    assert best.choice.shares == (1, 3) == best.choice.plan({}).shares
    even = search(replace(asked, pins={**asked.pins, "shares": (1, 1)})).best[0]
    assert even.seconds > 1.3 * best.seconds and even.choice.shares == (1, 1)
    together = search(replace(asked, pins={**asked.pins, "zero": 3})).best[0]
    assert together.choice.shares == (), "replicas that meet in their forwards run as many"
    for pins in ({}, {"shares": ()}):
        pins = {**asked.pins, **pins, "zero": 0, "exchange": "local_sgd"}
        alike = search(replace(asked, pins=pins)).best[0]
        assert alike.choice.shares == (), "an engine refuses other shares where replicas count alike"
        assert alike.microbatches == even.microbatches and alike.terms["compute"] == even.terms["compute"]
    mixed = search(replace(asked, exchanges=("allreduce", "bf16", "local_sgd"), pins={**asked.pins, "zero": 0})).best
    found = {each.choice.exchange: each.choice.shares for each in mixed}
    assert found["local_sgd"] == () and found["bf16"] == (1, 3), found
    alike = search(replace(asked, cluster=uneven(1e13, 1e13)))
    assert alike.best[0].choice.shares == ()


def test_hosts_of_two_speeds_are_searched_as_all_choices_are():
    asked = task(model(3), uneven(1e13, 2.5e13, count=2), rows=12, schedules=(("1f1b", 1),))
    search_all = Search(asked)
    every = [search_all.estimate(choice) for spread in search_all.spreads() for choice in search_all.choices(spread)]
    best = min(search_all.simulated(each).seconds for each in every if each.bytes <= asked.most)
    assert search(asked).best[0].seconds == pytest.approx(best, rel=1e-9)
    faster = search(replace(asked, cluster=uneven(1e13, 3.5e13, count=2))).best[0].seconds
    assert faster <= best and math.isfinite(faster)

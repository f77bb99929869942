"""Stages: the slowest takes as little as can be, and those that a search ends with are the best of all cuts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planner.balance import cut
from shoal.planner.cluster import Host
from shoal.planner.degrees import Spread
from shoal.planner.explain import roomy
from shoal.planner.pipes import Pace, fill, placed, simulated
from shoal.planner.profile import Cut, Profile
from shoal.planner.search import Search, search
from shoal.planner.task import Choice, Task
from tests.planner.models import BOTH, GIB, cluster, model, task
from tests.planner.test_search import cores


def all_cuts(pieces: int, stages: int) -> list[tuple[int, ...]]:
    ends = combinations(range(1, pieces), stages - 1)
    return [tuple(end - begin for begin, end in pairwise((0, *each, pieces))) for each in ends]


def slowest(costs: Sequence[float], speeds: Sequence[float], numbers: Sequence[int]) -> float:
    stages = [sum(costs[begin:end]) for begin, end in pairwise(accumulate(numbers, initial=0))]
    return max(sum(stages[rank :: len(speeds)]) / speed for rank, speed in enumerate(speeds))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.7, 9.0]), min_size=1, max_size=8), st.data())
@settings(max_examples=200)
def test_the_cut_is_the_best_of_all_cuts(costs: list[float], data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, len(costs)))
    speeds = data.draw(st.one_of(st.just([1.0] * ranks), st.lists(st.floats(0.2, 3.0), min_size=ranks, max_size=ranks)))
    numbers = cut(costs, speeds, placed(ranks, ranks))
    assert sum(numbers) == len(costs) and min(numbers) >= 1
    best = min(slowest(costs, speeds, each) for each in all_cuts(len(costs), ranks))
    assert slowest(costs, speeds, numbers) <= best * (1 + 1e-9)


@pytest.mark.parametrize("off", [1.346e-9, 2e-9, 1e-12])
def test_pieces_that_differ_by_rounding_are_cut_too(off: float) -> None:
    """A bound and the next one were taken for the same by one of two tolerances, for ever."""
    assert sum(cut([1 + off, 0.0, 0.0, 0.0, 1 + 2 * off], [1.0] * 3, placed(3, 3))) == 5


def test_what_does_not_come_out_even_is_at_the_front_and_no_stage_is_left_with_little() -> None:
    """Filled up from one end, nine equal pieces in four stages were one and three, three and two."""
    assert cut([1.0] * 9, [1.0] * 4, placed(4, 4)) == [3, 2, 2, 2]
    assert cut([1.0] * 5 + [2.0], [1.0] * 3, placed(3, 3)) == [3, 2, 1]


def test_of_ranks_with_several_stages_each_has_as_much() -> None:
    costs, speeds = [1.0] * 40, [1.0] * 8
    assert slowest(costs, speeds, cut(costs, speeds, placed(8, 32))) == 5.0
    assert slowest(costs, speeds, cut(costs, speeds, placed(8, 16))) == 5.0


def random_task(seed: int) -> Task:
    """A task of a pipeline, with blocks that are alike or not, and much memory or little."""
    of = random.Random(seed)
    profile = model(of.randint(5, 8))
    if of.random() < 0.7:
        works = [Cut(each.products.value * of.choice([0.5, 1, 2]), BOTH) for each in profile.parts]
        parts = [replace(each, kind=f"kind{at}", products=works[at]) for at, each in enumerate(profile.parts)]
        profile = replace(profile, parts=tuple(parts))
    on = cluster(1, 4, of.choice([0.7, 1, 8]) * GIB, between=of.choice([1e9, 1e11]))
    pins = {"pp": of.choice([2, 4, 4]), "memory": None, "zero": 0, "tp": 1}
    name = of.choice(["1f1b", "gpipe", "zb1p"])
    return task(profile, on, of.choice([8, 16]), pins=pins, schedules=((name, 1),), microbatch=2)


def seconds_of_all(asked: Task) -> float:
    """The least seconds of all choices with all cuts."""
    of, least = Search(asked), math.inf
    for choice in (each for spread in of.spreads() for each in of.choices(spread)):
        for numbers in all_cuts(len(of.prices.pieces), choice.spread.stages):
            begun = of.looked(choice._replace(stages=numbers))
            if of.fits(begun.choice, begun.fullest):
                least = min(least, of.simulated(of.finished(begun)).seconds)
    return least


@pytest.mark.parametrize("seed", range(12))
def test_a_search_finds_the_best_of_all_cuts(seed: int) -> None:
    asked = random_task(seed)
    least, found = seconds_of_all(asked), Search(asked).run()
    assert (found.best[0].seconds if found.best else math.inf) == pytest.approx(least, rel=1e-9)


def test_some_of_these_are_not_what_a_search_begins_with() -> None:
    asked = [random_task(seed) for seed in range(12)]
    found = [(Search(each), search(each).best[0].choice) for each in asked if math.isfinite(seconds_of_all(each))]
    begun = [of.cuts(choice._replace(stages=(), recompute="none")).numbers for of, choice in found]
    assert sum(choice.stages != numbers for (_, choice), numbers in zip(found, begun, strict=True)) >= 3


def heavy_front() -> Profile:
    """A model whose first blocks have most of the weights, and its last ones most of the work."""
    profile = model(6)
    blocks = [
        replace(each, kind=f"kind{at}", weights=Cut(elements, {}), trained=Cut(elements, {}))
        for at, each in enumerate(profile.parts)
        for elements in [4e7 if at < 4 else 1e6]
    ]
    return replace(profile, parts=tuple(blocks))


def test_what_fits_with_other_stages_alone_is_found_and_counts_as_what_fits() -> None:
    """Stages as fast as each other left one without room, and the model was said not to fit."""
    pins = {"pp": 2, "memory": None, "tp": 1, "cp": 1}
    free = task(heavy_front(), cluster(1, 2), 8, pins=pins, schedules=(("1f1b", 1),), microbatch=1)
    of = Search(free)
    choice = Choice(Spread(stages=2), 1, recompute="full")
    needs = {numbers: of.looked(choice._replace(stages=numbers)).fullest.bytes for numbers in all_cuts(6, 2)}
    first, least = needs[of.cuts(choice).numbers], min(needs.values())
    assert least < 0.8 * first
    tight = replace(free, limit=1.01 * least)
    assert search(tight).best[0].bytes <= tight.most
    assert roomy(tight) == Spread(stages=2)
    less = replace(free, limit=0.99 * least)
    assert roomy(less) is None
    near = Search(less).run().nearest
    assert near is not None and near.bytes == pytest.approx(least), "what is said to be needed at least"
    given = replace(less, pins={**pins, "stages": list(of.cuts(choice).numbers)})
    near = Search(given).run().nearest
    assert near is not None and near.bytes == pytest.approx(first), "stages that are given stay"


def test_of_many_deep_stages_few_cuts_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a tenth of a second there, and hundreds were: a minute and a half for one answer."""
    simulated_cuts = list[Choice]()
    real = Search.simulated
    monkeypatch.setattr(Search, "simulated", lambda of, each: (simulated_cuts.append(each.choice), real(of, each))[1])
    pins = {"pp": 32, "schedule": {"name": "interleaved", "chunks": 4}, "memory": None}
    search(task(model(150, 1e6), cluster(8, 4, 64 * GIB), 128, pins=pins, microbatch=1))
    assert len(simulated_cuts) < 40


def test_a_step_whose_last_group_is_not_full_is_extrapolated_from_such() -> None:
    stages = [Pace(1 / 4, 2 / 4)] * 64
    for number in (33, 40, 48):
        seconds = simulated("interleaved", 16, number, 4, stages, 0.0)
        assert seconds == pytest.approx(number * 3 + fill("interleaved", 16, number, 4, 15 * 1.0, 15 * 2.0))


@pytest.mark.parametrize("seed", [44, 60, 96])
def test_what_needs_no_stages_is_looked_for_beside_twelve_pipelines(seed: int) -> None:
    """Where ranks share cores the closed form of these says less than they take, and no other was among the best."""
    of = random.Random(seed)
    crowd, memory, rate = of.choice([1.0, 2.0, 4.0]), of.choice([0.7, 1, 3]), of.choice([3e7, 1e8, 1e10])
    on = replace(cores(crowd, memory * GIB, rate), overlap=0.3)
    asked = task(model(of.randint(4, 9), 3e6), on, of.choice([8, 16]), pins={"cp": 1, "tp": 1})
    found, whole = search(asked).best[0], search(replace(asked, pins={**asked.pins, "pp": 1})).best[0]
    assert found.seconds <= whole.seconds


def test_hosts_that_differ_are_compared_at_the_rows_of_each_microbatch() -> None:
    """One is faster in products, the other in launches. They were compared once, at rows that nobody chose, so the same
    plan took another time where its microbatch was given."""
    plain = cluster(hosts=1, count=2)
    device = replace(plain.hosts[0].device, launch=5e-3)
    other = replace(device, name="other", flops={"bf16": 3e12}, launch=2e-6)
    on = replace(plain, hosts=(plain.hosts[0], replace(plain.hosts[0], device=other)))
    on = replace(on, hosts=(replace(on.hosts[0], device=device), on.hosts[1]))
    ratios = {rows: Search(task(on=on)).prices.speeds_of_hosts(Spread(), rows) for rows in (1, 64)}
    assert ratios[1][1] / ratios[1][0] != pytest.approx(ratios[64][1] / ratios[64][0], rel=0.05)
    asked = task(model(9), on, pins={"pp": 2, "memory": None})
    for found in search(asked).best:
        given = Search(replace(asked, microbatch=found.choice.microbatch))
        again = given.simulated(given.estimate(found.choice._replace(recompute="none", shares=())))
        assert again.seconds == pytest.approx(found.seconds, rel=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_hosts_that_differ_are_no_faster_than_the_faster_ones_and_no_slower_than_the_slower(
    compiled: bool, first: int
) -> None:
    """Compiled, another device was the one that others wait for, and shares were of one kind, speeds of the other."""
    plain = cluster(hosts=1, count=2).hosts[0]
    late = replace(plain.device, name="late", launch=6e-3)
    slow = replace(plain.device, name="slow", launch=2e-6, flops={"bf16": 4e12})
    hosts = [replace(plain, device=each) for each in (late, slow)]

    def asked(*each: Host) -> Task:
        on = replace(cluster(), hosts=each)
        return task(model(9), on, pins={"memory": None, "compile": compiled}, microbatch=2)

    ends = sorted(search(asked(each, each)).best[0].seconds for each in hosts)
    mixed = asked(hosts[first], hosts[1 - first])
    found = search(mixed).best[0]
    assert ends[0] <= found.seconds <= ends[1]
    of = Search(mixed)
    for choice in (each for spread in of.spreads() for each in of.firsts(spread)):
        least = max(of.bound(choice.spread), of.products(choice.spread, choice.microbatch, compiled))
        assert least <= math.fsum(of.looked(choice).terms.values())


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 7, 8, 12, 13, 16])
@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zb1p", 1), ("zbv", 2)]
)
def test_what_ranks_wait_is_what_lists_of_actions_do_for_any_number_of_microbatches(
    name: str, chunks: int, ranks: int, number: int
) -> None:
    """With fewer of them than ranks, or a last group that is not full, it was up to two thirds less; of zbv more."""
    for forward, backward in ((1.0, 2.0), (1.0, 3.0), (2.0, 2.0)):
        stages = [Pace(forward / chunks, backward / chunks)] * ranks * chunks
        seconds = simulated(name, ranks, number, chunks, stages, 0.0)
        waits = fill(name, ranks, number, chunks, (ranks - 1) * forward, (ranks - 1) * backward)
        near = 0.08 if name == "zbv" and backward != 2 * forward else 1e-9
        assert number * (forward + backward) + waits == pytest.approx(seconds, rel=near)

"""What a schedule takes where its backwards are in halves, and where its ranks share cores."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.pipeline import kept, make_schedule
from shoal.planner.degrees import Spread
from shoal.planner.lanes import within
from shoal.planner.pipes import ALONE, Crowd, Pace, parted, placed, simulated, slowest, under_way, waiting, waits
from shoal.planner.search import Search
from tests.planner.models import cluster, task


def test_a_rank_alone_at_work_has_the_core_of_the_one_that_waits():
    """One microbatch: F0 F1 B1 B0, one after the other, each at twice the speed of two ranks on one core."""
    both, crowd = [Pace(1.0, 3.0), Pace(1.0, 3.0)], Crowd(2.0, 2, 2)
    assert simulated("1f1b", 2, 1, 1, both, 0.0) == 8
    assert simulated("1f1b", 2, 1, 1, both, 0.0, crowd) == pytest.approx(4)
    assert simulated("1f1b", 2, 1, 1, both, 0.5, crowd) == pytest.approx(5), "a message takes as long as before"
    assert waiting(4.0, 4.0, 2, 2.0) == 0 and waiting(4.0, 4.0, 2, 1.0) == 4


def test_four_ranks_on_two_cores_wait_half_as_long():
    """A rank has a core of its own at most: the chain of eight goes at twice the speed, where each rank has two."""
    all_alike = [Pace(1.0, 1.0)] * 4
    assert simulated("1f1b", 4, 1, 1, all_alike, 0.0) == 8
    assert simulated("1f1b", 4, 1, 1, all_alike, 0.0, Crowd(2.0, 4, 4)) == pytest.approx(4)
    assert waiting(6.0, 2.0, 4, 2.0) == 2


def test_of_ranks_that_compute_while_others_wait_some_share_a_core():
    """Two of four ranks on two cores are on one of them in a case of three; one, and three, leave no core idle."""
    crowd = Crowd(2.0, 4, 2)
    assert [crowd.speed(each / 4) for each in (1, 2, 3, 4)] == pytest.approx([2, 5 / 3, 4 / 3, 1])
    both = [Pace(1.0, 3.0), Pace(1.0, 3.0)]
    assert simulated("1f1b", 2, 1, 1, both, 0.0, crowd) == pytest.approx(8 / (5 / 3))


def test_stages_on_a_host_of_their_own_leave_its_cores_to_nobody():
    """Two hosts with two stages each, of two microbatches: F0 alone, F1 and F0 on one core, F1 and F2 alone, F3 and F2
    on one core, F3 alone. It was as if a stage that waits left its cores to those of another host."""
    forwards = [Pace(1.0, 0.0)] * 4
    assert simulated("gpipe", 4, 2, 1, forwards, 0.0, Crowd(2.0, 2, 2)) == pytest.approx(0.5 + 1 + 0.5 + 1 + 0.5)
    assert simulated("gpipe", 4, 2, 1, forwards, 0.0, Crowd(2.0, 2, 1)) == 5
    assert waits(6.0, 2.0, 2.0, Crowd(2.0, 4, 1), 2.0) == (6.0, 2.0)


def test_cores_compute_for_others_while_a_rank_waits_for_a_message():
    """Two on a core, which work for two seconds and wait for eight: of five seconds the core has three to wait."""
    assert waits(6.0, 2.0, 2.0, Crowd(2.0, 4, 4), 2.0) == (1.0, 2.0)
    assert waits(1.0, 4.0, 3.0, Crowd(2.0, 4, 4), 3.0) == (0.0, 1.0), "a part of the messages"
    assert waits(0.0, 3.0, 4.0, Crowd(2.0, 4, 4), 4.0) == (0.0, 0.0), "others have enough to do"
    assert waits(0.0, 1.0, 4.0, Crowd(2.0, 4, 4), 3.0) == (-1.0, 0.0), "others end early"
    assert waits(6.0, 2.0, 2.0, Crowd(1.0, 4, 4), 2.0) == (6.0, 2.0), "each has a core of its own"


def test_the_longest_stage_has_the_cores_of_those_that_are_done():
    """Each rank works for a second, then the first has eight left: at twice the speed these take four."""
    assert simulated("gpipe", 2, 1, 1, [Pace(9.0, 0.0), Pace(1.0, 0.0)], 0.0, Crowd(2.0, 2, 2)) == pytest.approx(5)
    terms = within({"compute": 8.0, "parts": 2.0, "stages": 0.0, "optimizer": 1.0}, 5.0, Crowd(2.0, 2, 2))
    assert terms == {"compute": 4.0, "parts": 1.0, "stages": 0.0, "optimizer": 1.0, "bubble": 0.0}


@pytest.mark.parametrize(
    ("seconds", "of_stages", "bubble"), [(5.0, 0.0, 0.0), (8.0, 0.0, 0.0), (10.0, 2.0, 0.0), (12.0, 3.0, 1.0)]
)
def test_what_waits_for_a_message_on_a_shared_core_is_in_the_seconds_of_the_schedule(seconds, of_stages, bubble):
    """Of ranks that share cores the terms add up to what the schedule takes; of others a message may slow down what
    is computed beside it, which the schedule's actions do not say."""
    terms = {"compute": 8.0, "stages": 3.0}
    shared, alone = within(terms, seconds, Crowd(2.0, 4, 4)), within(terms, seconds, ALONE)
    assert math.fsum(shared.values()) == pytest.approx(seconds)
    assert (shared["stages"], shared["bubble"]) == pytest.approx((of_stages, bubble))
    assert alone["stages"] == 3.0
    assert seconds < 8 or math.fsum(alone.values()) == pytest.approx(max(seconds, 11.0))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zb1p", 1)]),
    ranks=st.integers(2, 4),
    microbatches=st.integers(1, 6),
    crowd=st.floats(1.0, 4.0),
    replicas=st.integers(1, 4),
    data=st.data(),
)
def test_sharing_cores_never_takes_longer_and_no_work_is_spared(name, ranks, microbatches, crowd, replicas, data):
    schedule, chunks = name
    seconds = st.floats(0.1, 3.0)
    stages = [Pace(data.draw(seconds), data.draw(seconds)) for _ in range(ranks * chunks)]
    asked = schedule, ranks, microbatches, chunks, stages, 0.0
    alone, shared = simulated(*asked), simulated(*asked, Crowd(crowd, ranks * replicas, ranks))
    work = microbatches * math.fsum(each.forward + each.backward for each in stages)
    assert max(work / ranks, alone / crowd) <= shared * (1 + 1e-9)
    assert shared <= alone * (1 + 1e-9)


def test_each_half_of_a_backward_computes_again():
    """In zb1p nobody waits for the first rank's backwards, which run as wholes; all of the second one's are halves."""
    assert parted("1f1b", 2, 8, 1) == (0, 0)
    assert parted("zb1p", 2, 8, 1) == (0, 1)
    stages = [Pace(1.0, 2.0 + 1.0, 1.0, 0.0), Pace(1.0, 2.0 + 2.0, 1.0, 1.0)]
    assert slowest(stages, placed(2, 2)) == (1, 5.0)
    assert simulated("zb1p", 2, 8, 1, stages, 0.0) == pytest.approx(8 * 5 + 1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 12])
@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
def test_formulas_say_what_lists_of_actions_do(ranks, microbatches, name):
    orders = make_schedule(name, ranks, microbatches, 1).orders
    most = [(max(sum(now.values()) for now in kept(order)),) for order in orders]
    assert under_way(name, ranks, microbatches, 1) == tuple(most)
    halves = [sum(each.kind == "I" for each in order) / microbatches for order in orders]
    assert parted(name, ranks, microbatches, 1) == (0.0, *halves[1:])  # nobody waits for the first stage


@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zb1p", 2), ("zbv", 2)]
)
def test_of_many_microbatches_as_many_are_under_way_as_by_the_whole_schedule(name, chunks):
    """Where all forwards come first (of gpipe, and of groups of which the last is short) those of three groups were all
    that was counted."""
    for ranks, groups, more in product((2, 3, 4), (1, 3, 8), (0, 1)):
        number = ranks * groups + more
        orders = make_schedule(name, ranks, number, chunks).orders
        most = [max(sum(now.values()) for now in kept(order)) for order in orders]
        assert [sum(each) for each in under_way(name, ranks, number, chunks)] == most


@pytest.mark.parametrize("on_host", [False, True])
def test_halves_of_a_backward_take_python_of_cores(on_host):
    on = cluster(1, 8)
    host = on.hosts[0]
    on = replace(on, hosts=(replace(host, device=replace(host.device, on_host=on_host, launch=1e-3)),))

    def compute(schedule: str) -> float:
        asked = Search(task(on=on, rows=16, microbatch=2, recompute=("none",), schedules=((schedule, 1),)))
        choice = next(each for each in asked.choices(Spread(stages=2, copies=4)) if each.zero == 0)
        return asked.estimate(choice).terms["compute"]

    assert (compute("zb1p") > compute("1f1b")) is on_host
    assert compute("zb1p") >= compute("1f1b")


def test_recompute_in_halves_is_priced_twice():
    def compute(schedule: str, recompute: str) -> float:
        asked = Search(task(rows=16, microbatch=2, recompute=(recompute,), schedules=((schedule, 1),)))
        spread = Spread(stages=2, copies=4)
        choice = next(each for each in asked.choices(spread) if each.zero == 0)
        return asked.estimate(choice).terms["compute"]

    again = compute("1f1b", "full") - compute("1f1b", "none")
    assert again > 0
    assert compute("zb1p", "full") - compute("zb1p", "none") == pytest.approx(2 * again)

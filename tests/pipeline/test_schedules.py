"""Schedules: complete, without a halt, within their memory, as fast as the formulas say; wrong ones are named."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import Plan
from shoal.errors import UserError
from shoal.pipeline import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    check,
    live_activations,
    make_schedule,
    read_schedule,
    samples_to_fill,
    schedule_of,
    simulate,
    write_schedule,
)
from shoal.pipeline.actions import as_orders
from tests.pipeline.versions import kept_versions, versions

pytestmark = pytest.mark.fast
ANY = settings(max_examples=60, deadline=None)
CHUNKS = {"interleaved": [2, 3, 4], "zb1p": [1, 2, 3], "zbv": [2]}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 13))
    every = draw(st.none() | st.integers(1, 5)) if name == "2bw" else None
    return make_schedule(name, ranks, microbatches, draw(st.sampled_from(CHUNKS.get(name, [1]))), every)


@ANY
@given(schedules())
def test_each_is_complete_and_comes_to_its_end(schedule):
    check(schedule)
    number = Counter(action.kind for order in schedule.orders for action in order)
    assert (
        number["F"] == number["B"] + number["I"] == schedule.stages * schedule.microbatches
        and number["I"] == number["W"]
    )
    assert bool(number["I"]) <= (schedule.name in ("zb1p", "zbv")) and bool(number["U"]) <= (not schedule.flushes)


def in_halves(schedule: Schedule) -> Schedule:
    """Each backward in two."""
    orders = [
        [
            Action(kind, each.stage, each.microbatch)
            for each in order
            for kind in ("IW" if each.kind == "B" else each.kind)
        ]
        for order in schedule.orders
    ]
    return replace(schedule, orders=as_orders(orders))


@ANY
@given(schedules().filter(lambda each: each.name in ("zb1p", "zbv")))
def test_backwards_are_whole_where_that_makes_nothing_later(schedule):
    costs = Costs.even(schedule.stages)
    seconds = simulate(schedule, costs).seconds
    assert simulate(in_halves(schedule), costs).seconds == seconds
    for rank, order in enumerate(schedule.orders):
        for place, (one, then) in enumerate(pairwise(order)):
            if one.kind == "I" and then == Action("W", one.stage, one.microbatch):  # to join these too would
                whole = (*order[:place], Action("B", one.stage, one.microbatch), *order[place + 2 :])
                other = replace(schedule, orders=(*schedule.orders[:rank], whole, *schedule.orders[rank + 1 :]))
                assert simulate(other, costs).seconds > seconds


def most(schedule: Schedule) -> list[int]:
    """The activations of each rank that docs/pipeline.md promises not to exceed, in stages."""
    R, V, M = schedule.ranks, schedule.chunks, schedule.microbatches
    found = []
    for rank in range(R):
        if schedule.name == "gpipe":
            found.append(M)
        elif schedule.name == "zbv":
            found.append(2 * R)
        elif V > 1 and M > R and M % R:
            found.append(V * M)  # its last group is smaller: all forwards come first
        else:
            ahead = 2 * (R - rank - 1) + (V - 1) * min(R, M) if V > 1 else R - rank - 1
            found.append(ahead + 1 + (rank if schedule.name == "zb1p" else 0))
    return [min(each, V * M) for each in found]


@ANY
@given(schedules())
def test_activations_stay_within_what_is_said(schedule):
    assert all(live <= limit for live, limit in zip(live_activations(schedule), most(schedule), strict=True))


def by_events(schedule: Schedule, costs: Costs) -> float:
    """A second simulation: a queue of ends, each of which lets others begin."""
    places, running, done, clock = [0] * schedule.ranks, [False] * schedule.ranks, dict[Action, float](), 0.0
    queue: list[tuple[float, int, int]] = [(0.0, -1, -1)]
    arrivals: set[float] = set()
    while queue:
        clock, rank, place = heapq.heappop(queue)
        if rank >= 0:
            done[schedule.orders[rank][place]] = clock
            running[rank] = False
            if costs.message and clock + costs.message not in arrivals:
                arrivals.add(clock + costs.message)
                heapq.heappush(queue, (clock + costs.message, -1, -1))
        for other, order in enumerate(schedule.orders):
            if running[other] or places[other] == len(order):
                continue
            action = order[places[other]]
            here = all(
                need in done and done[need] + (costs.message if schedule.rank_of(need.stage) != other else 0.0) <= clock
                for need in schedule.needs(action)
            )
            if here:
                running[other] = True
                heapq.heappush(queue, (clock + costs.of(action), other, places[other]))
                places[other] += 1
    return max(done.values())


@ANY
@given(schedules(), st.data())
def test_times_are_those_of_a_second_simulation(schedule, data):
    kinds = {(action.kind, action.stage) for order in schedule.orders for action in order}
    costs = Costs({each: data.draw(st.integers(1, 9)) for each in sorted(kinds)}, float(data.draw(st.integers(0, 3))))
    found = simulate(schedule, costs)
    assert found.seconds == by_events(schedule, costs)
    assert 0 <= found.bubble < 1
    for rank in found.spans:
        assert all(first[2] <= then[1] for first, then in pairwise(rank))


FORMULAS = {
    "gpipe": lambda R, M, V: (R - 1) / (M + R - 1),
    "1f1b": lambda R, M, V: (R - 1) / (M + R - 1),
    "interleaved": lambda R, M, V: (R - 1) / (V * M + R - 1),
    "zbv": lambda R, M, V: (R - 1) / (6 * M + R - 1),
}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 6), (8, 16), (8, 32)])
@pytest.mark.parametrize(
    ("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zbv", 2)]
)
def test_the_bubble_is_that_of_the_closed_formula(name, chunks, ranks, microbatches):
    schedule = make_schedule(name, ranks, microbatches, chunks)
    found = simulate(schedule, Costs.even(schedule.stages)).bubble
    assert found == pytest.approx(FORMULAS[name](ranks, microbatches, chunks))


@pytest.mark.parametrize(
    ("name", "chunks", "percent"),
    [("gpipe", 1, 27.3), ("1f1b", 1, 27.3), ("interleaved", 2, 15.8), ("zb1p", 2, 5.9), ("zbv", 2, 5.9)],
)
def test_known_bubbles_of_four_ranks_and_eight_microbatches(name, chunks, percent):
    schedule = make_schedule(name, 4, 8, chunks)
    assert 100 * simulate(schedule, Costs.even(schedule.stages)).bubble == pytest.approx(percent, abs=0.05)


def test_the_weights_half_fills_what_was_waiting():
    """ZB-H1: of the bubble of 1F1B a third is left, with as much memory."""
    for ranks, microbatches in ((2, 8), (4, 8), (4, 16)):
        whole, split = make_schedule("1f1b", ranks, microbatches), make_schedule("zb1p", ranks, microbatches)
        costs = Costs.even(ranks)
        waits = [simulate(each, costs).seconds - 3 * microbatches for each in (whole, split)]
        assert waits[1] == pytest.approx(waits[0] / 3)
        assert max(live_activations(split)) == max(live_activations(whole))


def test_updates_without_a_flush():
    each = make_schedule("pipedream", 3, 5)
    assert [str(action) for action in each.orders[2]][:6] == ["F2:0", "B2:0", "U2:0", "F2:1", "B2:1", "U2:1"]
    some = make_schedule("2bw", 3, 7, every=3)
    assert [str(action) for action in some.orders[0] if action.kind == "U"] == ["U0:2", "U0:5"]
    assert simulate(make_schedule("pipedream", 4, 200), Costs.even(4)).bubble < 0.02


@ANY
@given(st.integers(1, 6), st.integers(1, 20))
def test_pipedream_keeps_as_many_versions_as_stages_are_left(ranks, microbatches):
    schedule = make_schedule("pipedream", ranks, microbatches)
    kept = kept_versions(schedule)
    assert all(number <= ranks - rank for rank, number in enumerate(kept))
    if microbatches >= 2 * ranks:
        assert kept == [ranks - rank for rank in range(ranks)]
    seen = versions(schedule)
    for rank in range(ranks):  # a stage's microbatch lacks the updates of those that are between it and the loss
        for each in range(microbatches):
            assert seen[Action("F", rank, each)] == max(0, each - (ranks - rank - 1))


@ANY
@given(st.integers(1, 6), st.integers(1, 30), st.data())
def test_two_versions_do_where_an_update_takes_as_many_microbatches_as_ranks(ranks, microbatches, data):
    every = data.draw(st.integers(ranks, 2 * ranks))
    schedule = make_schedule("2bw", ranks, microbatches, every=every)
    assert max(kept_versions(schedule)) <= 2
    for action, version in versions(schedule).items():
        assert action.microbatch // every - 1 <= version <= action.microbatch // every, "at most one update late"


def test_with_vertical_sync_all_stages_see_the_version_of_the_first():
    schedule = make_schedule("pipedream", 3, 8)
    seen = versions(schedule, vertical_sync=True)
    assert all(seen[Action("F", stage, each)] == seen[Action("F", 0, each)] for stage in range(3) for each in range(8))
    assert max(kept_versions(schedule, vertical_sync=True)) == 3


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_file_gives_back_what_was_written(name, tmp_path):
    schedule = make_schedule(name, 3, 5)
    write_schedule(schedule, tmp_path / f"{name}.txt")
    found = read_schedule(tmp_path / f"{name}.txt", schedule.chunks, schedule.placement)
    assert found.orders == schedule.orders and found.flushes == schedule.flushes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0:0 B0:0\nF1:0 b1:0\n", "line 2: 'b1:0' is no action"),
        ("F0:0 B0:0\n# nothing\nF1:0\n", "rank 1: of the backward of stage 1, microbatch 0, give B, or I and W"),
        ("F0:0 B0:0\nB1:0\n", "rank 1: F1:0 is missing"),
        ("F0:0 B0:0\nF1:0 B1:0 F1:0\n", "rank 1: F1:0 comes 2 times"),
        ("F0:0 B0:0 F1:0 B1:0\nF1:0 B1:0\n", "rank 0: F1:0 is of a stage that rank 1 has; this one has [0]"),
        ("F0:0 I0:0 B0:0\nF1:0 B1:0\n", "give B, or I and W"),
        ("B0:0 F0:0\nF1:0 B1:0\n", "comes to a halt: rank 0 at B0:0 for F0:0, B1:0; rank 1 at F1:0 for F0:0"),
        ("F0:0 B0:0 F0:1 B0:1\nF1:1 B1:1 F1:0 B1:0\n", "rank 0 at B0:0 for B1:0; rank 1 at F1:1 for F0:1"),
    ],
)
def test_wrong_files_say_where_and_what(text, message, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        read_schedule(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1", 2, 4), 'Did you mean "1f1b"'),
        (("1f1b", 2, 4, 2), "takes 1 chunk a rank, not 2"),
        (("zbv", 2, 4, 3), "takes 2 chunks a rank, not 3"),
        (("gpipe", 0, 4), "both must be at least 1"),
        (("gpipe", 2, 4, 1, 2), "no parameter every"),
        (("2bw", 2, 4, 1, 0), "at least 1 microbatch"),
    ],
)
def test_what_a_schedule_does_not_take_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        make_schedule(*arguments)


def test_a_file_may_say_how_many_activations_are_kept(tmp_path):
    write_schedule(make_schedule("gpipe", 2, 4), tmp_path / "all.txt")
    mine = {"name": "file", "path": str(tmp_path / "all.txt")}
    assert schedule_of(Plan(pp=2, schedule={**mine, "activations": 4}), 4).microbatches == 4
    with pytest.raises(UserError, match=r"rank 0: at F0:3 it keeps the activations of 4 forwards, and 3 are allowed"):
        schedule_of(Plan(pp=2, schedule={**mine, "activations": 3}), 4)
    with pytest.raises(UserError, match=r"activations .the most forwards"):
        schedule_of(Plan(pp=2, schedule={**mine, "live": 3}), 4)


def test_a_file_with_updates_is_none_to_run(tmp_path):
    write_schedule(make_schedule("pipedream", 2, 4), tmp_path / "mine.txt")
    with pytest.raises(UserError, match=r"has updates .U. among its actions"):
        schedule_of(Plan(pp=2, schedule={"name": "file", "path": str(tmp_path / "mine.txt")}), 4)


def test_orders_for_other_ranks_are_refused():
    with pytest.raises(UserError, match="1 orders for 2 ranks"):
        check(replace(make_schedule("gpipe", 2, 2), orders=make_schedule("gpipe", 1, 2).orders))


@pytest.mark.parametrize(
    ("plan", "samples", "each"),
    [
        (Plan(), 64, 64),
        (Plan(pp=2), 64, 8),
        (Plan(pp=2), 5, 1),
        (Plan(pp=2), 20, 2),
        (Plan(pp=2, schedule="interleaved"), 24, 3),
        (Plan(pp=4), 100, 5),
        (Plan(pp=2, schedule="pipedream"), 64, 64),
    ],
    ids=str,
)
def test_microbatches_that_keep_a_pipeline_busy(plan, samples, each):
    assert samples_to_fill(plan, samples) == each
    if plan.pp > 1 and samples >= 8 * plan.pp and plan.schedule != "pipedream":
        schedule = schedule_of(plan, -(-samples // each))
        assert simulate(schedule, Costs.even(schedule.stages)).bubble < 0.21

"""The search: what it finds is the best of all choices, and it goes by what is asked."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import accumulate, combinations_with_replacement
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cli.answer import money, shown
from shoal.errors import UserError
from shoal.plan import Plan
from shoal.planner import exchanges
from shoal.planner.cluster import Cluster
from shoal.planner.degrees import Spread
from shoal.planner.explain import (
    MOST,
    explain,
    fits,
    fragile,
    largest,
    numbers_of_hosts,
    smallest,
    why_not,
    within_budget,
)
from shoal.planner.pipes import Pace, fill, longer_by, placed, simulated, slowest
from shoal.planner.profile import Cut
from shoal.planner.search import Search, search
from shoal.planner.task import Choice, Task
from shoal.training.microbatches import largest_share
from tests.planner.models import GIB, MIB, cluster, model, part, task


def every(asked: Search) -> list[float]:
    """Seconds of all choices that fit, with the waiting of their schedules. State goes elsewhere only where it, or what
    backward keeps, does not fit on the device."""
    looked = [asked.looked(choice) for spread in asked.spreads() for choice in asked.choices(spread)]
    found = [asked.finished(way) for each in looked for way in (each, *asked.freer(each))]
    found = [each for each in found if each.bytes <= asked.task.most]
    bare = [each.choice for each in found if not each.choice.offload and each.choice.recompute == "none"]
    nearer = [each.choice._replace(offload=None, recompute="none") for each in found]
    left = [each for each, near in zip(found, nearer, strict=True) if not each.choice.offload or near not in bare]
    return sorted(asked.simulated(each).seconds for each in left)


def test_the_best_of_all_where_what_is_hidden_costs_more_than_it_takes() -> None:
    """Ranks that share cores lose more to an exchange beside them than it takes alone."""
    seconds = []
    for between in (1e9, 2e9):
        on = replace(cluster(memory=1.5 * GIB, between=between), contention=3.0)
        asked = task(on=on, schedules=(("1f1b", 1),))
        seconds.append(search(asked).best[0].seconds)
        assert seconds[-1] == pytest.approx(every(Search(asked))[0], rel=1e-9)
    assert seconds[1] <= seconds[0], "more bandwidth is never slower"


@pytest.mark.parametrize("memory", [0.7 * GIB, 1.5 * GIB, 8 * GIB])
@pytest.mark.parametrize("between", [1e9, 1e11])
def test_the_best_of_all(memory: float, between: float) -> None:
    asked = task(on=cluster(memory=memory, between=between), schedules=(("1f1b", 1),))
    found = search(asked)
    assert found.best[0].seconds == pytest.approx(every(Search(asked))[0], rel=1e-9)
    assert found.best[0].bytes <= asked.most
    assert all(each.choice.spread.size == 8 for each in found.best)
    assert [each.seconds for each in found.best] == sorted(each.seconds for each in found.best)


@pytest.mark.parametrize("crowd", [1.0, 3.0])
def test_what_a_choice_is_not_below_has_the_waiting_of_its_pipeline(crowd: float) -> None:
    """It had that of no pipeline, and deep ones were solved whole to be left out."""
    small = replace(cluster(memory=0.5 * GIB), contention=crowd)
    schedules = ("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb1p", 1), ("zbv", 2)
    asked, seen = Search(task(on=small, schedules=schedules)), set[str]()
    for choice in (each for spread in asked.spreads() for each in asked.choices(spread)):
        seconds, again = asked.floor(choice)
        assert seconds <= asked.timed(choice)
        if again and choice.spread.stages > 1:
            seen.add(choice.schedule)
            assert seconds >= (1 - 1e-8) * asked.least(choice)
    assert seen == {name for name, _ in schedules}


def test_no_estimate_by_zb1p_is_below_what_its_stages_take_at_least_where_another_one_becomes_the_slowest() -> None:
    """The first stage takes longer, as attention does backward, and has the shorter forwards; the second one has to
    compute a block again, and takes longer then."""
    block = part("", 5e10, 1e6, 32 * MIB)
    attention = replace(block, kind="attention", attention=Cut(3.2e10, {}))
    other = replace(part("", 9.8e10, 1e6, 40 * MIB), kind="other")
    blocks = [replace(attention if place < 30 else other, name=f"blocks.{place}") for place in range(60)]
    first, *_, last = model(elements=1e6).parts
    last = replace(part("head", 0.0, 1e6, MIB, block=False), name=last.name)
    pins = {"pp": 2, "stages": [30, 30], "schedule": "zb1p"}
    profile = replace(model(), parts=(first, *blocks, last))
    asked = task(profile, cluster(2, 1, 64 * GIB), 2, microbatch=2, recompute=("none", "full"), pins=pins)
    choice = next(Search(asked).choices(Spread(stages=2)))
    plain = Search(asked).estimate(choice)
    tight = Search(replace(asked, limit=0.9999 * plain.bytes))
    again = tight.estimate(choice)
    assert [each.get("full", 0) for each in again.again] == [0, 1]
    assert [slowest(each.stages, placed(2, 2))[0] for each in (plain, again)] == [0, 1]
    for of, closed in ((Search(asked), plain), (tight, again)):
        assert of.simulated(closed).seconds == pytest.approx(closed.seconds, rel=0.03)
    assert tight.least(choice) <= tight.timed(choice)


def cores(crowd: float, memory: float, rate: float, count: int = 4) -> Cluster:
    """A host of so many ranks, `crowd` of which share a core, with so much memory each, over a link of this rate."""
    on = cluster(hosts=1, count=count, inside=rate)
    device = replace(on.hosts[0].device, on_host=True, crowd=crowd)
    return replace(on, hosts=(replace(on.hosts[0], device=device, memory=int(count * memory)),))


@pytest.mark.parametrize("schedule", [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb1p", 1)], ids=str)
def test_nothing_by_which_choices_are_left_out_is_above_one_where_stages_share_cores_behind_slow_links(
    schedule: tuple[str, int],
) -> None:
    """What is computed again fills cores that wait for messages: a step is longer by less than that takes."""

    @settings(max_examples=4)
    @given(st.floats(1.0, 4.0), st.floats(7.0, 10.0), st.floats(0.4, 1.2), st.floats(0, 1))
    def holds(crowd: float, rate: float, memory: float, overlap: float) -> None:
        on = replace(cores(crowd, memory * GIB, 10**rate), overlap=overlap)
        asked = Search(task(model(8), on, schedules=(schedule,), pins={"tp": 1, "cp": 1}))
        for choice in (each for spread in asked.spreads() for each in asked.choices(spread)):
            seconds, again = asked.floor(choice)
            assert seconds <= asked.timed(choice)
            products = asked.products(choice.spread, choice.microbatch, False)
            least = max(asked.bound(choice.spread), products, asked.least(choice))
            for counts in (asked.counts(choice), *map(asked.lane(choice).all_by, ("none", "selective", "full"))):
                assert least <= (1 + 1e-12) * math.fsum(asked.begun(choice, counts).terms.values())
            if again and choice.spread.stages > 1:
                assert seconds >= (1 - 1e-8) * asked.least(choice)

    holds()


@pytest.mark.parametrize(("crowd", "rate", "schedules"), [(2.0, 3e7, 5), (4.0, 1e8, 1)])
def test_few_that_are_simulated_have_the_best_of_all_where_stages_share_cores_behind_a_slow_link(
    crowd: float, rate: float, schedules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait for messages, and those that end early, leave their cores to others. Before simulation each such
    pipeline was taken to be slower, and the best was not even among twelve."""
    monkeypatch.setattr("shoal.planner.search.BEST", 6)
    tried = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4), ("zb1p", 1))[:schedules]
    on = replace(cores(crowd, 3 * GIB, rate), overlap=0.3)
    asked = task(model(9, 3e6), on, schedules=tried, pins={"cp": 1})
    found, least = search(asked).best[0], every(Search(asked))[0]
    assert found.seconds <= least * (1 + 1e-9)
    assert found.choice.spread.stages > 1 or found.seconds == pytest.approx(least, rel=1e-9)


def test_of_stages_that_share_cores_forward_and_backward_are_as_much_of_computing_as_before() -> None:
    """Stages that end early leave their core to the one that works longest, whose forwards take less then, too."""
    on = cluster(hosts=1, count=4, memory=8 * GIB)
    crowded = replace(on.hosts[0].device, on_host=True, crowd=2.0)
    of = Search(task(on=replace(on, hosts=(replace(on.hosts[0], device=crowded),))))
    closed = of.estimate(Choice(Spread(stages=4), 8))
    found = of.simulated(closed)
    assert closed.forward + closed.backward == pytest.approx(closed.terms["compute"])
    assert found.terms["compute"] < closed.terms["compute"]
    assert found.forward + found.backward == pytest.approx(found.terms["compute"])


def test_what_stages_wait_for_messages_is_what_their_schedule_leaves_of_them() -> None:
    """Not what the closed form had left, which may be less."""
    of = Search(task(on=cores(2.0, 8 * GIB, 1e7), schedules=(("1f1b", 1),)))
    choice = Choice(Spread(stages=4), 4)
    closed = of.estimate(choice)
    found, sends = of.simulated(closed), of.sends(choice, closed.microbatches)
    assert 0 < closed.terms["stages"] < found.terms["stages"] <= sends
    alone = Search(task(on=cores(1.0, 8 * GIB, 1e7), schedules=(("1f1b", 1),))).estimate(choice)
    assert alone.terms["stages"] == sends, "who has its core alone leaves it to nobody"


def test_a_pipeline_over_hosts_of_cores_waits_as_long_as_one_of_devices() -> None:
    """Each of two hosts has one of two stages: while that waits, nobody computes on its cores."""
    on = cores(2.0, 8 * GIB, 1e9)
    of = Search(task(on=replace(on, hosts=on.hosts * 2)))
    choice = Choice(Spread(stages=2, copies=4), 1)
    closed = of.estimate(choice)
    stages, number, message = closed.stages, closed.microbatches, of.message(choice)
    assert closed.terms["bubble"] == pytest.approx(longer_by(stages, number))
    assert closed.terms["stages"] == of.sends(choice, number)
    found = math.fsum(of.simulated(closed).terms[what] for what in ("compute", "bubble", "stages"))
    assert found == pytest.approx(simulated("1f1b", 2, number, 1, stages, message))


def test_a_microbatch_that_is_given_is_dealt_whole() -> None:
    """Of four microbatches eight replicas have one, or none: as many rows as of four replicas, in as much memory."""
    asked = Search(task(microbatch=8))
    four, eight = (asked.estimate(next(asked.choices(Spread(copies=copies, parts=8 // copies)))) for copies in (4, 8))
    assert four.choice.microbatch == eight.choice.microbatch == 8
    assert largest_share(4, Plan(dp=8)) == eight.microbatches == 1
    whole = Search(task(microbatch=32, whole=True))
    assert next(whole.choices(Spread(copies=8))).microbatch == 4


def test_a_host_that_is_too_small_is_what_is_named() -> None:
    """The device has room; it was said to need less than it may use."""
    on = cluster(hosts=1, count=1, memory=2 * GIB)
    small = replace(on, hosts=tuple(replace(host, memory=GIB) for host in on.hosts))
    asked = task(model(blocks=40), on=small, rows=2)
    with pytest.raises(UserError, match=r"takes ([\d.]+) GiB of its host for a rank, where \d+ MiB are. Take more"):
        search(asked)
    assert search(replace(asked, cluster=on)).best


def with_bandwidth(bandwidth: float, memory: float = 8 * GIB) -> Cluster:
    """The cluster with devices whose memory is so fast."""
    on = cluster(memory=memory)
    device = replace(on.hosts[0].device, bandwidth=bandwidth)
    return replace(on, hosts=tuple(replace(host, device=device) for host in on.hosts))


@pytest.mark.parametrize("memory", [0.7 * GIB, 8 * GIB])
def test_blocks_are_compiled_where_that_clearly_pays(memory: float) -> None:
    plain = task(on=with_bandwidth(1e9, memory), schedules=(("1f1b", 1),), microbatch=2)
    asked = replace(plain, compiled=True)
    every_one = Search(asked)
    best = search(asked).best[0]
    assert best.choice.compile and best.choice.plan({}).compile is True
    assert best.seconds == pytest.approx(every(every_one)[0], rel=1e-9)
    eager = search(plain).best[0]
    assert not eager.choice.compile and best.seconds < eager.seconds / 1.05
    assert not search(replace(asked, steps=2)).best[0].choice.compile  # it takes longer than it spares
    assert search(replace(asked, pins={"compile": False})).best[0].seconds == eager.seconds
    assert search(replace(plain, pins={"compile": True})).best[0].seconds == best.seconds
    assert search(replace(plain, pins={"compile": "aot_eager"})).best[0].seconds == eager.seconds  # it fuses nothing


def test_compiled_blocks_keep_results_of_operations_as_one_graph_alone() -> None:
    """Not where ranks call each other inside of it, nor where the model was found to break it."""
    asked = task(on=with_bandwidth(1e9, 1.7 * GIB), pins={"compile": True, "zero": 0}, microbatch=2)
    found = Search(asked)

    def ways(search: Search) -> dict[bool, set[bool]]:
        """By whether blocks are cut: whether some of them keep results."""
        kept: dict[bool, set[bool]] = {False: set(), True: set()}
        for spread in search.spreads():
            for choice in search.choices(spread):
                some = "selective" in str(search.estimate(choice).choice.recompute)
                kept[spread.parts * spread.tokens * spread.stages > 1].add(some)
        return kept

    assert ways(found) == {False: {False, True}, True: {False}}
    assert ways(Search(replace(asked, selective=False)))[False] == {False}
    pinned = task(on=with_bandwidth(1e9, 1.7 * GIB), pins={"recompute": "selective"}, compiled=True)
    every_one = [each for spread in Search(pinned).spreads() for each in Search(pinned).choices(spread)]
    assert {each.spread.copies for each in every_one if each.compile} == {8}


def test_what_is_spared_by_less_than_predictions_are_off_is_left() -> None:
    asked = task(on=with_bandwidth(1e11), microbatch=2)
    found = search(replace(asked, compiled=True)).best
    assert not found[0].choice.compile
    assert found[0].seconds == search(asked).best[0].seconds


def test_more_is_never_slower() -> None:
    seconds = [search(task(on=cluster(memory=memory * GIB))).best[0].seconds for memory in (0.6, 0.8, 1.2, 2, 4)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    seconds = [search(task(on=cluster(between=rate))).best[0].seconds for rate in (1e8, 1e9, 1e10, 1e11)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]
    seconds = [search(task(on=cluster(1, 8, inside=rate))).best[0].seconds for rate in (1e8, 1e9, 1e10, 1e11)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_the_fullest_rank_is_run_dry_wherever_it_is() -> None:
    """Of eight stages one of those between keeps more for backward than all others together."""
    plain = model(16)
    parts = list(plain.parts)
    parts[11] = replace(parts[11], kind="wide", saved=Cut(GIB, {}))
    asked = Search(task(replace(plain, parts=tuple(parts)), cluster(memory=99 * GIB)))
    found = asked.estimate(Choice(Spread(stages=8), 1))
    before = [0, *accumulate(found.choice.stages)]  # blocks, of which the wide one is the eleventh
    assert before[found.fullest] <= 10 < before[found.fullest + 1]
    assert found.places == [0, 1, found.fullest, 7] and found.fullest not in (0, 1, 7)
    assert Search(task(plain)).estimate(Choice(Spread(stages=8), 1)).places == [0, 1, 7]
    assert Search(task(plain)).estimate(Choice(Spread(copies=8), 1)).places == [0]


def moving(memory: int, to_host: float) -> Task:
    """A task whose state is at home on the host of a device that may use so many MiB."""
    on = with_bandwidth(1e11)
    hosts = tuple(replace(host, count=1, to_host=to_host) for host in on.hosts[:1])
    pins = {"memory": {"device": f"{memory}MiB"}}
    return task(model(4, 2e7), replace(on, hosts=hosts), 8, pins=pins)


@pytest.mark.parametrize("to_host", [1e9, 4e9, 3e10])
@pytest.mark.parametrize("memory", [420, 700, 900])
def test_what_moves_and_what_is_computed_again_are_the_best_of_all_pairs(memory: int, to_host: float) -> None:
    """Blocks are computed again so that weights stay, where that takes less time than moving them in each pass."""
    search = Search(moving(memory, to_host))
    seconds = []
    for choice in (choice for spread in search.spreads() for choice in search.choices(spread)):
        ways = range(len(search.lane(choice).policies))
        for blocks in combinations_with_replacement(ways, 4):
            begun = search.begun(choice, [(tuple(blocks.count(way) for way in ways),)])
            if search.fits(choice, begun.fullest):
                seconds.append(search.simulated(search.finished(begun)).seconds)
    assert search.run().best[0].seconds == pytest.approx(min(seconds), rel=1e-9)


def test_more_memory_is_not_slower_where_weights_move() -> None:
    found = [search(moving(memory, 4e9)).best[0].seconds for memory in range(400, 900, 20)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]


def test_what_fills_a_budget_is_not_above_it() -> None:
    """By rounding it was, of one budget in a few: plans that fitted were refused, and with more memory there was
    none."""
    for memory in range(400, 430):
        asked = Search(task(model(3, 5e7), cluster(1, 1, memory * 1.37 * MIB), microbatch=1))
        choices = [each for spread in asked.spreads() for each in asked.choices(spread) if each.offload is not None]
        filled = [asked.holds(each) for each in choices]
        assert any(0 < each.stays < 1 or 0 < each.again < 1 for each in filled)
        assert all(each.bytes <= asked.task.most for each in filled if each.again < 1)


def test_each_rank_has_room_on_its_host_and_not_only_the_one_whose_device_is_fullest() -> None:
    """Of a pipeline all devices are filled to the budget; by rounding one was the fullest, and the host of another one
    had not room for what is at home there: with more memory no plan fitted."""
    on = cluster(3, 1, 8 * GIB)
    seen = 0
    for memory in range(300, 1500, 50):
        asked = Search(task(model(6, 5e7), on, 8, microbatch=1, pins={"memory": {"device": f"{memory}MiB"}, "pp": 3}))
        for choice in (choice for spread in asked.spreads() for choice in asked.choices(spread)):
            has, ranks = asked.holds(choice), asked.each(choice)
            assert has.host == max(each.host for each in ranks) and has.bytes == max(each.bytes for each in ranks)
            seen += max(ranks, key=lambda each: each.bytes).host < has.host
    assert seen


def test_a_disk_that_the_machine_does_not_have_is_refused() -> None:
    pins = {"memory": {"device": "1GiB", "host": "800MiB", "disk": "/scratch"}}
    on = cluster(hosts=1, count=1)
    with pytest.raises(UserError, match=r"plan.memory.disk = '/scratch': a host of toy has no disk .*: give disk"):
        search(task(on=on, pins=pins))
    assert search(task(on=replace(on, hosts=(replace(on.hosts[0], disk=1e9),)), pins=pins)).best


def test_what_moves_does_so_while_a_rank_waits_for_other_stages() -> None:
    """With faster devices a step took longer: less was hidden by computing, and nothing by the longer wait."""
    pins = {"pp": 2, "tp": 1, "schedule": "zb1p", "memory": {"device": "1200MiB"}, "recompute": "none"}
    asked = task(model(9), cluster(2, 1, inside=1e9, between=1e8), 32, microbatch=1, pins=pins)
    device = asked.cluster.hosts[0].device

    def seconds(faster: float) -> float:
        own = replace(device, flops={"bf16": faster * device.flops["bf16"]})
        hosts = tuple(replace(host, device=own, to_host=1e9) for host in asked.cluster.hosts)
        return search(replace(asked, cluster=replace(asked.cluster, hosts=hosts))).best[0].seconds

    found = [seconds(faster) for faster in (1, 2, 5, 20)]
    assert found == sorted(found, reverse=True)


def test_the_same_question_has_the_same_answer() -> None:
    assert search(task()).best == search(task()).best


def test_pins_hold_and_other_fields_are_found() -> None:
    pins = {"tp": 2, "pp": 2, "zero": 1, "schedule": "interleaved", "recompute": "full"}
    best = search(task(pins=pins)).best
    for each in best:
        plan = each.choice.plan(pins)
        assert (plan.tp, plan.pp, plan.zero, plan.schedule, plan.recompute) == (2, 2, 1, "interleaved", "full")
        assert plan.size == 8 and isinstance(plan.stages, list) and sum(plan.stages) == 6 and len(plan.stages) == 4
    with pytest.raises(UserError, match="tp = 3"):
        search(task(pins={"tp": 3}))


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (
            {"pp": 2, "stages": [3, 2]},
            r"at least 1 of them, and all of them together \(5 are given\)",
        ),
        ({"pp": 2, "stages": [0, 6]}, r"\[0, 6\]: the model has 6 blocks; give each stage at least 1 of them"),
        ({"pp": 2, "stages": [2, 2, 2]}, r"stages are plan.pp times the chunks of the schedule, .*; leave out stages$"),
        ({"pp": 2, "stages": [1, 5], "schedule": "interleaved"}, "stages are plan.pp times the chunks"),
        ({"pp": 4, "schedule": "interleaved"}, "stages are plan.pp times the chunks of the schedule, each of a block"),
    ],
)
def test_stages_that_the_model_does_not_have_are_refused(pins: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        search(task(pins=pins))


def test_stages_that_are_given_are_those_of_each_candidate() -> None:
    pinned = task(pins={"pp": 2, "stages": [1, 1, 1, 3]})
    found = search(pinned).best
    assert {str(each.choice.stages) for each in found} == {"(1, 1, 1, 3)"}
    assert {each.choice.schedule for each in found} <= {"interleaved", "zbv"}
    assert fits(pinned) and largest(pinned)[0] > 6, "a deeper model is cut by the planner"  # type: ignore[operator]
    even = search(task(pins={"pp": 2, "schedule": "interleaved", "stages": [1, 2, 2, 1]})).best
    assert even[0].seconds < found[0].seconds


@pytest.mark.parametrize(("pins", "dp"), [({"shard": 2}, {2, 4, 8}), ({"shard": 4, "zero": 1}, {4, 8})])
def test_a_pinned_shard_is_of_each_candidate(pins: dict[str, Any], dp: set[int]) -> None:
    plans = [each.choice.plan(pins) for each in search(task(pins=pins)).best]
    assert {each.dp for each in plans} <= dp and all(each.shard == pins["shard"] and each.zero for each in plans)
    with pytest.raises(
        UserError,
        match=r"no degrees fit 8 devices, .* with shard = 3: .* dp may be 1 or 2 .*; leave out shard or take shard = 2",
    ):
        search(task(pins={"shard": 3}))


def test_more_stages_than_blocks_are_refused_with_the_most_that_there_can_be() -> None:
    blocks = task().profile.blocks
    with pytest.raises(UserError, match=rf"no degrees .* {blocks} stages .*; leave out pp or take pp = 1 or 2 or 4$"):
        search(task(pins={"pp": 8}))


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(UserError, match=r"no plan fits: the one that needs least, .* may use 7.36 MiB\. Take"):
        search(task(on=cluster(memory=8 * MIB)))


def test_a_budget_takes_fewer_hosts_and_is_kept() -> None:
    asked = task(on=cluster(hosts=4, between=1e9))

    def price(of: Cluster) -> float:
        return 1000 * search(replace(asked, cluster=of)).best[0].seconds / 3600 * of.price

    whole, one = price(asked.cluster), price(asked.cluster.with_hosts(1))
    assert one < whole
    within = within_budget(asked, (one + whole) / 2, lambda each: 1000 * each.seconds)
    assert len(within.cluster.hosts) < 4 and price(within.cluster) <= (one + whole) / 2
    assert within_budget(asked, 2 * whole, lambda each: 1000 * each.seconds, "usd").cluster == asked.cluster
    with pytest.raises(UserError, match=r"the cheapest takes [0-9.,]+ USD. Give as much") as raised:
        within_budget(asked, one / 10, lambda each: 1000 * each.seconds)
    enough = money(re.search(r"takes (\S+ USD)", str(raised.value))[1])[0]  # type: ignore[index]
    assert price(within_budget(asked, enough, lambda each: 1000 * each.seconds).cluster) <= enough <= 1.001 * one
    with pytest.raises(UserError, match=r"no plan fits: the one that needs least, .* Take more devices"):
        within_budget(task(on=cluster(memory=8 * MIB)), one, lambda each: each.seconds)
    free = [replace(host, price=0.0) for host in asked.cluster.hosts]
    none = r"--budget needs prices above 0, and no host of toy has one: give price .* in \[\[hosts\]\] .* or leave out"
    with pytest.raises(UserError, match=none):
        within_budget(replace(asked, cluster=replace(asked.cluster, hosts=tuple(free))), 5, lambda each: each.seconds)
    for currency in ("kUSD", "EUR"):
        with pytest.raises(UserError, match=f'--budget is in "{currency}", prices of toy in "USD"'):
            within_budget(asked, whole, lambda each: 1000 * each.seconds, currency)


def test_a_budget_takes_the_fastest_of_all_numbers_of_hosts() -> None:
    asked = task(on=cluster(hosts=7, count=1, between=5e10), rows=60)
    best = [search(replace(asked, cluster=asked.cluster.with_hosts(number))).best[0].seconds for number in range(1, 8)]
    prices = [each * number for number, each in enumerate(best, 1)]  # an hour of a host costs 2, a job is 1,800 steps
    for budget in (prices[2], prices[4], prices[5], 2 * max(prices)):
        within = within_budget(asked, budget * 1.000001, lambda each: 1800 * each.seconds)
        fastest = min(
            (each, number) for number, (each, price) in enumerate(zip(best, prices, strict=True), 1) if price <= budget
        )
        assert len(within.cluster.hosts) == fastest[1], budget


def test_numbers_of_hosts() -> None:
    assert numbers_of_hosts(1) == [1] and numbers_of_hosts(16) == list(range(1, 17))
    assert numbers_of_hosts(128) == [1, 2, 4, *range(8, 129, 8)]


def test_the_smallest_part_is_of_the_hosts_with_most_memory() -> None:
    little, plenty = cluster(hosts=2, count=2, memory=0.1 * GIB), cluster(hosts=3, count=2, memory=2 * GIB)
    both = replace(little, hosts=little.hosts + plenty.hosts)
    need = smallest(task(on=plenty))
    assert need <= 2 and smallest(task(on=both)) == need
    deep = task(model(30), on=cluster(hosts=8, count=1), pins={"memory": None})
    number = smallest(deep)
    assert number == 4 and smallest(replace(deep, profile=model(60))) == 6, "other numbers than divisors"
    assert fits(replace(deep, cluster=deep.cluster.with_hosts(number)))
    assert not fits(replace(deep, cluster=deep.cluster.with_hosts(number - 1)))
    assert smallest(replace(deep, limit=deep.most / 2)) > number, "a rank may not use more there"


def test_the_smallest_part_of_a_host_of_cores_keeps_to_what_a_rank_may_use() -> None:
    """Fewer ranks of a host have more of its memory each, but no more than `limit`."""
    host = replace(cluster().hosts[0], memory=4 * GIB)
    cores = replace(host, device=replace(host.device, on_host=True))
    devices, ranks = (task(on=replace(cluster(), hosts=(each,)), pins={"memory": None}) for each in (host, cores))
    assert smallest(ranks) == 1
    assert smallest(replace(ranks, limit=GIB / 2)) == smallest(replace(devices, limit=GIB / 2)) == 4


def test_what_was_not_asked_for_is_no_largest() -> None:
    found = search(task())
    told = explain(replace(task(), profile=model(6, 1e3, 10)), found.best[0], (), margins=False)
    assert (told.blocks, told.more_blocks, told.more_rows) == (6 << 10, True, False)
    told = explain(task(), found.best[0], (), margins=False)
    assert told.blocks is not None and told.blocks < MOST and not told.more_blocks and not told.more_rows


def test_a_slow_host_has_fewer_blocks() -> None:
    plain = cluster(hosts=2, count=1)
    slow = replace(plain.hosts[0], device=replace(plain.hosts[0].device, name="slow", flops={"bf16": 4e12}))
    uneven = replace(plain, hosts=(slow, plain.hosts[0]))
    stages = search(task(model(9), uneven, pins={"pp": 2})).best[0].choice.stages
    assert stages[0] < stages[1]


@pytest.mark.parametrize("worse", [{"bandwidth": 5e8}, {"launch": 5e-2}])
def test_a_host_is_as_slow_as_its_memory_and_launches(worse: dict[str, float]) -> None:
    """Of two hosts with products of one rate, one has the slower memory, or takes longer to launch: that one has fewer
    blocks, and a peak of twice the rate makes nothing slower and its memory no faster."""
    plain = cluster(hosts=2, count=1)
    device = plain.hosts[0].device
    slow, peaked = (
        replace(plain.hosts[0], device=replace(device, name=name, flops={"bf16": rate}, **worse))
        for name, rate in (("slow", 1e13), ("peaked", 2e13))
    )
    usual = plain.hosts[0]
    mixed, higher, both, none = (
        search(task(model(9), replace(plain, hosts=hosts), pins={"pp": 2})).best[0]
        for hosts in ((slow, usual), (peaked, usual), (slow, slow), (usual, usual))
    )
    assert mixed.choice.stages[0] < mixed.choice.stages[1]
    assert none.seconds < higher.seconds <= mixed.seconds < both.seconds


def test_more_memory_or_bandwidth_does_not_buy_what_a_dry_run_has_refused() -> None:
    asked = task(on=cluster(memory=1.2 * GIB))
    refused, second = search(asked).best[:2]
    assert refused.seconds < second.seconds
    never, told = (explain(asked, second, (), refused=each).bought for each in ([], [refused]))
    assert never["GB/s to the host"] == pytest.approx(second.seconds - refused.seconds)  # neither of them uses it
    assert told["GB/s to the host"] == 0 and all(saved <= never[what] for what, saved in told.items())


def test_what_is_simulated_is_what_the_formula_says() -> None:
    for name, chunks in (("1f1b", 1), ("interleaved", 2)):
        stages = [Pace(1.0 / chunks, 2.0 / chunks)] * 4 * chunks
        seconds = simulated(name, 4, 16, chunks, stages, 0.0)
        assert seconds == pytest.approx(16 * 3.0 + fill(name, 4, 16, chunks, 3 * 1.0, 3 * 2.0))
        assert chunks > 1 or longer_by(stages, 16) == pytest.approx(seconds - 16 * 3.0)
    for slow, waits in ((2, 2.5), (1, 1.5), (0, 0.5)):  # an earlier one has forwards to run meanwhile
        stages = [Pace(1.0, 2.0) if place == slow else Pace(0.5, 0.75) for place in range(3)]
        assert simulated("1f1b", 3, 16, 1, stages, 0.0) == pytest.approx(16 * 3.0 + waits)
        assert longer_by(stages, 16) == pytest.approx(waits), "it was 2.5 of each"
    few, many = (simulated("1f1b", 4, number, 1, [Pace(1.0, 2.0)] * 4, 0.0) for number in (64, 8192))
    assert many - few == pytest.approx(3.0 * (8192 - 64))  # the longer one is extrapolated


@pytest.mark.parametrize(
    ("elements", "rows", "zero", "microbatches", "share"),
    [
        (1e4, 1, 0, 1, 1.0),
        (1e4, 4, 0, 1, 1.0),
        (1e4, 1, 0, 4, 1.0),  # added up before
        (1e4, 1, 1, 4, 1.0),
        (1e4, 1, 2, 4, 1 / 4),  # those of the others go out while the next ones compute
        (1e4, 1, 2, 40, 0.05),
        (1e8, 1, 0, 1, 0.05),
        (1e8, 1, 2, 4, 0.05),
    ],
)
def test_the_last_of_few_chunks_is_exchanged_when_backward_has_ended(
    elements: float, rows: int, zero: int, microbatches: int, share: float
) -> None:
    """A small model's gradients are one chunk, which nothing hides, under ZeRO 2 that of the last microbatch; of many
    chunks the last one is a small share. The weights of ZeRO 1 and 2 come together after the update."""
    asked = task(
        model(elements=elements),
        replace(cluster(hosts=1, count=4, inside=5e11), contention=0.0),
        rows=4 * rows * microbatches,
    )
    seconds = Search(asked).estimate(Choice(Spread(copies=4), rows, zero=zero)).terms["copies"]
    trained, link = 8 * elements, asked.cluster.link(1, 4)
    calls = exchanges.chunks(4 * trained, link, 4)
    sums = microbatches if zero == 2 else 1
    whole = link.seconds("reduce_scatter" if zero else "all_reduce", 4 * trained * sums, 4, calls * sums)
    after = link.seconds("all_gather", 2 * trained, 4, calls) if zero else 0.0
    assert seconds == pytest.approx(share * whole + after, rel=0.02)


def test_copies_of_the_state_add_up_their_parts_between_hosts() -> None:
    """What shares a copy of it does so inside of a host, over its link."""
    on = replace(cluster(hosts=2, count=4, between=1e9), contention=0.0, overlap=0.0)
    asked = task(on=on, rows=16)
    seconds = Search(asked).estimate(Choice(Spread(copies=8), 1, zero=2, shard=4)).terms["copies"]
    trained, calls = 80e6, exchanges.chunks(320e6, on.link(1, 8), 8)
    inside = on.inside.seconds("reduce_scatter", 2 * 4 * trained, 4, 2 * calls)
    inside += on.inside.seconds("all_gather", 2 * trained, 4, calls)
    assert seconds == pytest.approx(inside + on.between.seconds("all_reduce", trained, 2, calls))


def test_an_explanation_holds_when_it_is_tried() -> None:
    asked = task(on=cluster(memory=1.2 * GIB))
    found = search(asked)
    told = explain(asked, found.best[0], found.best[1:6])
    assert told.blocks is not None and fits(replace(asked, profile=model(told.blocks)))
    assert not fits(replace(asked, profile=model(math.ceil(told.blocks * 1.1) + 1)))
    more = search(replace(asked, limit=asked.most + 1e9)).best[0].seconds
    assert told.bought["GB of memory"] == pytest.approx(found.best[0].seconds - more)
    assert told.devices <= 8 and told.rows >= 1
    said = [told.binding, *(why_not(found.best[0], each) for each in found.best[1:])]
    assert any("parallel communication +" in each for each in said), said
    assert not {"copies", "parts", "tokens", "stages"} & set(re.findall("[a-z]+", " ".join(said))), said


def test_communication_that_is_hidden_slows_computing() -> None:
    plain = cluster(between=1e9)
    choice = search(task(on=plain, pins={"dp": 8, "zero": 3})).best[0].choice
    seconds = [
        Search(task(on=replace(plain, contention=share))).estimate(choice).terms["copies"] for share in (0.0, 0.5, 1.0)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(seconds[2] - seconds[1]) and seconds[1] > seconds[0]


def test_an_error_may_have_one_win_that_is_not_among_the_five_best() -> None:
    """Many of these differ from the fastest in what hardly counts, and all by the same terms."""
    best = search(task()).best[0]
    chosen, near = replace(best, terms={"compute": 1.0}), [replace(best, terms={"compute": 1.0 + 1e-3})] * 6
    other = replace(best, terms={"compute": 0.8, "copies": 0.21})
    assert fragile(chosen, [*near, other]) == {"compute": 7, "copies": 7}
    told = replace(explain(task(), best, (), margins=False), fragile={"compute": 7})
    assert shown(told) == 7 and shown(replace(told, fragile={})) == 5


def test_a_rank_with_more_weights_ends_last_and_what_is_sent_is_of_the_one_that_works_longest() -> None:
    """The first of two stages has a large embedding, the second one the head that it waits for: their step ends with
    the exchange of the first, and the bytes are of the rank that `plan --compare` looks at."""
    parts = model().parts
    first = replace(parts[0], weights=Cut(400e6, {}), trained=Cut(400e6, {}))
    asked = Search(
        task(
            replace(model(), parts=(first, *parts[1:])),
            cluster(hosts=2, count=2, memory=64 * GIB),
            schedules=(("1f1b", 1),),
            pins={"pp": 2, "dp": 2, "zero": 0},
        )
    )
    choice = next(each for spread in asked.spreads() for each in asked.choices(spread))
    begun = asked.looked(choice)
    sizes = [each.trained for each in begun.lane.cuts.sizes]
    estimate = asked.finished(begun)
    alone = asked.beside(begun, 1)
    assert begun.slow == 1 and sizes[0] > 10 * sizes[1]
    assert estimate.wire["copies"] == 4 * sizes[1]  # of two copies each sends half of float32 twice
    assert estimate.terms["copies"] + estimate.terms["optimizer"] > 2 * alone.seconds

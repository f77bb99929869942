"""What a device takes for a part of a model, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shoal.planner.computing import ADDED, BACKWARD, FORWARD, ON_ACCELERATOR, ON_CORES, counted_again, seconds_of
from shoal.planner.costs import MET, SELECTED
from shoal.planner.degrees import Spread
from shoal.planner.exchanges import (
    HANDED,
    IDLE,
    MESSAGE,
    MICROBATCH,
    STEP,
    STEP_STATISTICS,
    STEP_TENSOR,
    WATCHED,
    WATCHED_EACH,
    agreed,
    chunks,
)
from shoal.planner.profile import Cut
from shoal.planner.search import Search
from shoal.planner.task import Choice, Offload, Task
from shoal.planner.trace import Statistics
from tests.planner.models import model, part, task


@pytest.mark.parametrize("rows", [1, 4])
def test_gradients_of_a_microbatch_are_added_once_whatever_its_rows(rows):
    asked, own = task(), part("block", 0.0, 1e6, 0.0)
    device = replace(asked.cluster.hosts[0].device, launch=0.0, on_host=True)
    forward, backward = (
        seconds_of(own, Spread(), rows, times, device, asked.numbers, False) for times in (FORWARD, BACKWARD)
    )
    added = ADDED * asked.numbers.gradient * 1e6 / (device.bandwidth * device.streams)
    assert backward == pytest.approx(2 * forward + added)
    cut = seconds_of(own, Spread(parts=4), rows, BACKWARD, device, asked.numbers, False)
    assert cut == pytest.approx(backward / 4)
    beside = replace(device, on_host=False)
    assert seconds_of(own, Spread(), rows, BACKWARD, beside, asked.numbers, False) == pytest.approx(2 * forward)


def test_on_cores_each_parameter_has_its_hook():
    asked, own = task(), part("block", 0.0, 0.0, 0.0)
    device = replace(asked.cluster.hosts[0].device, launch=1e-3, on_host=True)
    few, many = (
        seconds_of(replace(own, tensors=tensors), Spread(), 1, BACKWARD, device, asked.numbers, False)
        for tensors in (2, 5)
    )
    assert many - few == pytest.approx(3 * ON_CORES.hook * 1e-3)


def test_on_an_accelerator_the_host_may_be_late_with_what_is_computed_again():
    """A block of ten operations of which forward takes the device 1 s, where each is launched in so many."""
    asked, own = task(), replace(part("block", 0.0, 0.0, 0.0), tensors=2)
    own = replace(own, touched=replace(own.touched, value=asked.cluster.hosts[0].device.bandwidth))
    calls = own.calls.on(Spread())
    own = replace(own, packed=Cut(3 * calls / ON_ACCELERATOR.recalling, {}))

    def again(launch: float) -> float:
        device = replace(asked.cluster.hosts[0].device, launch=launch, streams=1.0, on_host=False)
        return counted_again([own], Spread(), 1, device, asked.numbers, False)[1]

    more = calls + ON_ACCELERATOR.block + 3 * calls  # of what is computed again, and of hooks of what is saved
    launches = 2 * calls + 2 * ON_ACCELERATOR.hook + more
    assert again(0.0) == pytest.approx(1)
    assert again(1 / launches) == pytest.approx(1), "the device has 3 s to do"
    assert again(4 / launches) == pytest.approx(2), "the host launches for 4 s where the backward alone takes 2"
    late = 10 / calls
    assert again(late) == pytest.approx(more * late), "what comes to the launches of a backward that is late"


def test_on_cores_what_operations_save_is_watched_where_weights_are_at_home_elsewhere():
    """Four blocks of ten operations on each of two stages, and an end of ten, for each of two microbatches."""
    asked = task(replace(model(8), statistics=Statistics(3, 60)), rows=16, microbatch=2)
    host = asked.cluster.hosts[0]
    choice = Choice(Spread(stages=2, copies=4), 2, offload=Offload())
    terms = list[dict[str, float]]()
    for launch in (0.0, 1e-3):
        device = replace(host.device, launch=launch, on_host=True, cold=3.0)
        on = replace(asked.cluster, hosts=(replace(host, device=device),) * 2)
        terms.append(Search(replace(asked, cluster=on)).estimate(choice).terms)
    watched = terms[1]["offload"] - terms[0]["offload"]
    assert watched == pytest.approx(2 * (3 * WATCHED + 50 * WATCHED_EACH) * 1e-3, rel=0.1)
    engine = 3 * (STEP + 2 * (MICROBATCH + 2 * MESSAGE)) + STEP_STATISTICS * 3 / 2
    assert terms[1]["other"] - terms[0]["other"] == pytest.approx(engine * 1e-3)


@pytest.mark.parametrize(("zero", "owners"), [(0, 1), (1, 4)])
def test_an_update_takes_python_of_cores_for_each_parameter_that_a_rank_updates(zero, owners):
    """Those of a rank's half of the blocks; under ZeRO each of four replicas updates a part of them."""
    plain = model(8)
    asked = task(replace(plain, parts=tuple(replace(part, tensors=5) for part in plain.parts)), rows=16, microbatch=2)
    host, choice = asked.cluster.hosts[0], Choice(Spread(stages=2, copies=4), 2, zero=zero)
    taken = list[float]()
    for launch in (0.0, 1e-3):
        device = replace(host.device, launch=launch, on_host=True)
        on = replace(asked.cluster, hosts=(replace(host, device=device),) * 2)
        taken.append(Search(replace(asked, cluster=on)).estimate(choice).terms["optimizer"])
    assert taken[1] - taken[0] == pytest.approx(STEP_TENSOR * 25 / owners * 1e-3)


@pytest.mark.parametrize(("spread", "share"), [(Spread(copies=8), 1.0), (Spread(stages=4, copies=2), 0.0)])
@pytest.mark.parametrize("number", [1, 4])
def test_replicas_that_share_cores_wait_for_each_other_once_a_step(spread, share, number):
    """By the root of what a rank computes, in as many steps' microbatches; stages have their schedule's waiting."""
    asked = task(rows=number * spread.copies)
    host, choice = asked.cluster.hosts[0], Choice(spread, 1)
    others = list[float]()
    for crowd in (1.0, 2.0):
        device = replace(host.device, launch=0.0, on_host=True, crowd=crowd)
        on = replace(asked.cluster, hosts=(replace(host, device=device),) * 2)
        search = Search(replace(asked, cluster=on))
        others.append(search.estimate(choice).terms["other"])
    computing = number * math.fsum(each.forward + each.backward for each in search.lane(choice).works)
    assert others[1] - others[0] == pytest.approx(share * IDLE * math.sqrt(computing))
    again = search.estimate(choice._replace(recompute="full")).terms
    assert again["other"] == others[1], "what is computed again is between the same two meetings"


@pytest.mark.parametrize(("spread", "slower"), [(Spread(copies=8, experts=2), 1.0), (Spread(copies=8), 1.5)])
def test_what_ranks_wait_for_each_other_is_not_counted_twice(spread, slower):
    """Calls of experts count it, and so does what a compared run has taught of computing."""
    host = task().cluster.hosts[0]
    device = replace(host.device, launch=0.0, on_host=True, crowd=2.0, slower=slower)
    prices = Search(replace(task(), cluster=replace(task().cluster, hosts=(replace(host, device=device),) * 2))).prices
    found = [agreed(prices, Choice(spread, 1), 1, computing) for computing in (0.0, 1.0)]
    assert found[0] == found[1] > 0


def on_cores(asked: Task, cold: float) -> Search:
    """As asked, of cores that take a millisecond a launch."""
    host = asked.cluster.hosts[0]
    device = replace(host.device, launch=1e-3, on_host=True, cold=cold)
    return Search(replace(asked, cluster=replace(asked.cluster, hosts=(replace(host, device=device),) * 2)))


def test_calls_inside_of_a_model_take_python_of_cores():
    """Two of a block by ranks that divide matrices, there and back."""
    spread = Spread(parts=2)
    warm, cold = (on_cores(task(), factor).prices.spent(1, spread, 1) for factor in (1.0, 3.0))
    assert cold.forward - warm.forward == pytest.approx(2 * MET[""] * 2e-3)
    assert cold.backward - warm.backward == pytest.approx(2 * MET[""] * 2e-3)
    assert cold.sent_forward == warm.sent_forward, "what is sent takes as long"
    alone = [on_cores(task(), factor).prices.spent(1, Spread(), 1) for factor in (1.0, 3.0)]
    assert alone[0] == alone[1]
    again = [on_cores(task(), factor).prices.again(1, spread, 1)["full"][0] for factor in (1.0, 3.0)]
    calls = 2 * MET[""] * task().profile.parts[1].messages[0].repeated
    assert again[1] - again[0] == pytest.approx((calls + ON_CORES.block) * 2e-3)


def test_where_torch_asks_of_each_operation_it_asks_of_those_of_a_call_too():
    """Two calls of a block by ranks that divide matrices, in its forward and as often again."""
    prices, message = on_cores(task(), 1.0).prices, task().profile.parts[1].messages[0]
    computed, _ = prices._recompute(1, Spread(parts=2), 1)
    again = prices.again(1, Spread(parts=2), 1)
    launches = 2 * message.repeated * MET[""] + 2 * (1 + message.repeated) * SELECTED
    assert again["selective"][0] - computed == pytest.approx(launches * 1e-3)
    assert prices.again(1, Spread(), 1)["selective"][0] == prices._recompute(1, Spread(), 1)[0]


def test_each_chunk_of_gradients_takes_python_of_cores():
    asked, choice = task(rows=8), Choice(Spread(copies=8), 1)
    warm, cold = (on_cores(asked, factor).estimate(choice).terms["copies"] for factor in (1.0, 3.0))
    elements = sum(each.trained.value for each in asked.profile.parts)
    number = chunks(asked.numbers.gradient * elements, asked.cluster.link(1, 8), 8)
    assert number > 1 and cold - warm == pytest.approx(number * HANDED * 2e-3)

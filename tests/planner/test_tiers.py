"""What lies elsewhere than on the device: by closed forms what the plan of moves, the placement of pages and a dry run
say of the same chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal.chunks.movement import fetched, plan
from shoal.errors import UserError
from shoal.models import build
from shoal.plan import Plan
from shoal.planner import Machine, Subject, predict
from shoal.planner.ask import numbers_of
from shoal.planner.cluster import Cluster, Device, Host, Link
from shoal.planner.degrees import Spread
from shoal.planner.dry_run import dry_run
from shoal.planner.explain import explain
from shoal.planner.held import Held
from shoal.planner.profile import Profile, profile
from shoal.planner.search import Search, search
from shoal.planner.task import Choice, Estimate, Offload, Task
from shoal.precision import precision
from tests.planner.models import GIB, MIB, cluster, model, task

BLOCKS, NUMBER = 6, 3
ALONE = cluster(hosts=1, count=1)
STATE = 8 * 10e6 * (2 + 4 + 4 + 8)
"""Bytes of weights, gradients, masters and optimizer state of the model of these tests."""


def priced(asked: Task, offload: Offload | None) -> tuple[Search, Choice, Estimate]:
    found = Search(asked)
    (spread,) = found.spreads()
    choice = Choice(spread, 2, offload=offload)
    return found, choice, found.estimate(choice)


def held_of(asked: Task, offload: Offload) -> Held:
    found, choice, _ = priced(asked, offload)
    lane = found.lane(choice)
    return found._held(choice, lane, 0, lane.none(), 1)


@pytest.mark.parametrize("fit", range(4, 9))
def test_weights_come_as_often_as_the_plan_of_moves_brings_them(fit: int) -> None:
    pieces, number, size = 8, 4, 20_000_000
    once = [frozenset({each}) for each in (*range(pieces), *reversed(range(pieces)))]
    wanted = fetched(plan(once * number, [size] * pieces, fit * size), [size] * pieces)
    least = held_of(task(on=ALONE), Offload(0.0)).device
    room = sum(least.values()) - least["weights in use"] + fit * size
    has = held_of(task(on=ALONE), Offload(room))
    assert has.stays == 0 and has.times(number) * pieces * size == pytest.approx(wanted, rel=0.02)


def test_what_is_left_keeps_state_until_nothing_moves() -> None:
    found, before = [], None
    for memory in (0.65, 0.7, 1.0, 1.5, 2.0, 4.0):
        has = held_of(task(on=ALONE), Offload(memory * GIB))
        found.append(has)
        assert sum(has.device.values()) <= memory * GIB
        if before is not None:
            assert has.times(2) <= before.times(2) and has.stays >= before.stays and has.host <= before.host
        before = has
    first, last = found[0], found[-1]
    assert first.stays == 0 and first.again > 0 and first.host == pytest.approx(STATE)
    assert last.stays == 1 and last.times(2) == 0 and last.host == 0
    assert sum(last.device[role] for role in ("weights", "gradients", "masters", "optimizer state")) >= STATE


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_activations_that_wait_on_the_host_leave_their_room(share: float) -> None:
    asked = task(on=ALONE)
    whole, less = held_of(asked, Offload(0.6 * GIB)), held_of(asked, Offload(0.6 * GIB, activations=share))
    assert less.device["activations"] == pytest.approx((1 - share) * whole.device["activations"])
    state = STATE * (1 - less.stays) + share * whole.device["activations"]
    assert less.host == pytest.approx(state) and less.times(2) < whole.times(2)
    assert priced(asked, Offload(0.6 * GIB, activations=share))[2].terms["offload"] > 0


def test_the_disk_has_what_the_host_has_no_room_for() -> None:
    small = replace(ALONE.hosts[0], memory=GIB, disk=2e9)
    asked = task(on=replace(ALONE, hosts=(small,)), rows=4)
    asked = replace(asked, limit=0.6 * GIB)
    best = search(asked).best[0]
    away = best.choice.offload
    assert away is not None and away.disk == "/tmp/shoal" and away.host == pytest.approx(0.8 * GIB)
    assert 0 < best.on_disk < STATE and best.on_host <= 0.8 * GIB * 1.001
    assert best.choice.plan({}).memory["disk"] == "/tmp/shoal"
    roomy = replace(asked, cluster=replace(ALONE, hosts=(replace(small, memory=64 * GIB),)))
    faster = search(roomy).best
    assert faster[0].seconds < best.seconds
    assert all(each.choice.offload is None or each.choice.offload.disk is None for each in faster)


def test_more_of_a_tier_is_never_slower() -> None:
    base = replace(ALONE.hosts[0], memory=2 * GIB, disk=2e9)

    def seconds(host: Host, limit: float = 0.7 * GIB) -> float:
        return search(replace(task(on=replace(ALONE, hosts=(host,)), rows=8), limit=limit)).best[0].seconds

    for key, values in {
        "memory": (1 * GIB, 2 * GIB, 8 * GIB),
        "disk": (5e8, 2e9, 8e9),
        "to_host": (1e9, 1e10, 1e11),
    }.items():
        found = [seconds(replace(base, **{key: value})) for value in values]  # type: ignore[arg-type]
        assert found == sorted(found, reverse=True), key
    found = [seconds(base, limit * GIB) for limit in (0.5, 0.6, 0.8, 1.0, 1.5, 3.0)]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]


def test_what_is_pinned_is_taken_as_it_is() -> None:
    pins = {"memory": {"device": "600MiB", "activations": 0.5}}
    best = search(task(on=ALONE, pins=pins)).best
    assert {each.choice.offload for each in best} == {Offload(600 * MIB, activations=0.5)}
    assert all(each.choice.plan(pins).memory == pins["memory"] for each in best)
    assert all(sum(each.memory.values()) <= 600 * MIB for each in best)
    assert all(each.choice.offload is None for each in search(task(on=ALONE, pins={"memory": None})).best)


def test_a_host_without_an_accelerator_has_a_disk_alone() -> None:
    device = Device("cores", {"bf16": 1e11}, 2 * GIB, 1e10, launch=1e-5, on_host=True)
    host = Host(device, 1, Link(1e-6, 1e9), int(1.2 * GIB), 1e10, disk=1e9, scratch="/scratch")
    asked = task(model(saved=2 * MIB), Cluster("cores", (host,), Link(1e-5, 1e9)), rows=2)
    best = search(asked).best
    assert best and all(each.choice.offload == Offload(disk="/scratch") for each in best)
    assert best[0].on_disk == pytest.approx(2 * 8 * 10e6 * (4 + 8)), "two generations of every page"
    assert best[0].bytes + best[0].on_host <= asked.most
    with pytest.raises(Exception, match="no plan fits"):
        search(replace(asked, cluster=replace(asked.cluster, hosts=(replace(host, disk=0.0),))))


def test_the_largest_model_counts_all_tiers() -> None:
    blocks = []
    for memory, disk in ((2 * GIB, 0.0), (8 * GIB, 0.0), (2 * GIB, 2e9)):
        host = replace(ALONE.hosts[0], memory=memory, disk=disk)
        asked = task(on=replace(ALONE, hosts=(host,)), rows=2, limit=0.6 * GIB)
        blocks.append(explain(asked, search(asked).best[0], [], margins=False).blocks)
    assert blocks[0] is not None and blocks[0] < blocks[1] and blocks[0] < blocks[2]


def subject_of(name: str) -> Subject:
    made = build({"name": "gpt", "layers": 8, "d_model": 256, "heads": 4, "vocab_size": 512, "sequence": 128})
    row = {key: torch.zeros(128, dtype=torch.int64) for key in ("input_ids", "labels")}
    return Subject(made.factory, made.loss, row, 2, precision(name), Plan())


@pytest.fixture(scope="module")
def traced() -> Profile:
    return profile(replace(subject_of("fp32"), microbatch=1), {})


PLACED = [Plan(dp=2, zero=zero) for zero in range(4)]
PLACED += [Plan(dp=2, zero=zero, memory={"activations": share}) for zero, share in ((0, 0.0), (3, 0.0), (3, 1.0))]
PLACED += [Plan(pp=2, schedule="interleaved", memory={"activations": 0.5})]


@pytest.mark.parametrize("plan", PLACED, ids=lambda plan: str(plan.to_dict()))
def test_a_rank_needs_at_least_what_a_dry_run_counts(plan: Plan, traced: Profile) -> None:
    """Of a budget that is too small for all only the least is there."""
    subject, optimizer = replace(subject_of("fp32"), plan=plan), partial(torch.optim.AdamW, lr=1e-3)
    on = cluster(hosts=1, count=2, memory=64 * GIB)
    numbers = replace(numbers_of(subject.precision, optimizer), dtype=torch.bfloat16)  # of which there is a peak
    asked = Search(Task(traced, on, 16, numbers, 2, pins={"recompute": "none"}))
    away = None if plan.memory is None else Offload(0.0, activations=plan.memory["activations"])
    schedule = ("1f1b", 1) if plan.pp == 1 else ("interleaved", 2)
    choice = Choice(Spread.of(plan), 2, zero=plan.zero, schedule=schedule[0], chunks=schedule[1], offload=away)
    machine = Machine(1 << 40, 1 << 40, 2)
    recorded = [dry_run(replace(subject, rank=rank)) for rank in range(plan.pp)]
    counted = [predict(each, optimizer, plan, subject.precision, machine, 8 // plan.dp) for each in recorded]
    least = max(each.need.smallest() for each in counted)
    assert 0.95 * least <= asked.estimate(choice).bytes <= 1.5 * least, "what is most at other moments is added up"


WORDS = [
    ({"dp": 2, "zero": zero, "recompute": recompute}, rows, tied)
    for zero in (0, 3)
    for recompute in ("none", "selective", "full")
    for rows, tied in ((2, True), (8, False))
]
WORDS += [({"tp": 2}, 1, True), ({"tp": 4}, 1, True), ({"tp": 4}, 1, False), ({"pp": 2, "recompute": "full"}, 8, True)]


@pytest.mark.parametrize("fields, rows, tied", WORDS, ids=str)
def test_a_vocabulary_that_is_most_of_a_model(fields: dict[str, Any], rows: int, tied: bool) -> None:
    """The loss was counted once more for a block that is computed again, gradients of a tied embedding once a row, and
    under tp a rank was said to have none of the weights of a model with such an embedding."""
    table = {"name": "gpt", "layers": 2, "d_model": 64, "heads": 4, "vocab_size": 8192, "sequence": 32, "tied": tied}
    made, row = build(table), {key: torch.zeros(32, dtype=torch.int64) for key in ("input_ids", "labels")}
    subject = Subject(made.factory, made.loss, row, 1, precision("fp32"), Plan())
    plan, optimizer = Plan.from_dict(fields), partial(torch.optim.AdamW, lr=1e-3)
    numbers = replace(numbers_of(subject.precision, optimizer), dtype=torch.bfloat16)  # of which there is a peak
    on = cluster(hosts=1, count=plan.size, memory=64 * GIB)
    traced = profile(subject, {"parts": (2,)} if plan.tp > 1 else {})
    asked = Search(Task(traced, on, 2 * rows, numbers, rows, pins={"recompute": plan.recompute}))
    estimate = asked.estimate(Choice(Spread.of(plan), rows, zero=plan.zero, recompute=plan.recompute))
    ranks = [dry_run(replace(subject, plan=plan, microbatch=rows, rank=rank)) for rank in range(plan.pp)]
    machine = Machine(1 << 40, 1 << 40, plan.size)
    needs = [predict(each, optimizer, plan, subject.precision, machine, 2 // plan.dp).need for each in ranks]
    counted = max(needs, key=lambda need: need.total("device"))
    assert estimate.memory["optimizer state"] == pytest.approx(counted.of("optimizer state"), rel=0.01)
    assert 0.98 <= estimate.bytes / counted.total("device") <= 1.15


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_on_cores_have_weights_in_common(zero: int, traced: Profile) -> None:
    """Role by role what a dry run counts: no weights that are gathered, and two gradients on loan."""
    plan = Plan(dp=2, zero=zero)
    subject, optimizer = replace(subject_of("fp32"), plan=plan), partial(torch.optim.AdamW, lr=1e-3)
    on = cluster(hosts=1, count=2, memory=64 * GIB)
    hosts = tuple(replace(each, device=replace(each.device, on_host=True)) for each in on.hosts)
    numbers = replace(numbers_of(subject.precision, optimizer), dtype=torch.bfloat16)  # of which there is a peak
    asked = Search(Task(traced, replace(on, hosts=hosts), 16, numbers, 2, pins={"recompute": "none"}))
    estimate = asked.estimate(Choice(Spread.of(plan), 2, zero=zero))
    counted = predict(dry_run(subject), optimizer, plan, subject.precision, Machine(1 << 40, None, 2), 4)
    rows = {row.role: row.nbytes for row in counted.need.rows}
    roles = ("weights", "gradients", "optimizer state", "weights in use", "gradients on loan")
    assert [estimate.memory.get(role, 0) for role in roles] == [
        pytest.approx(rows.get(role, 0), rel=0.05) for role in roles
    ]


def adapted() -> nn.Module:
    """A model whose embedding is its head too, and of which next to nothing is trained."""
    table = {"name": "gpt", "layers": 4, "d_model": 256, "heads": 4, "vocab_size": 8192, "sequence": 128, "tied": True}
    module = build(table).factory()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in name)
    return module


@pytest.mark.parametrize("plan", [Plan(dp=2, zero=zero) for zero in range(4)], ids=lambda plan: str(plan.zero))
def test_what_is_trained_of_a_model_with_adapters_is_counted(plan: Plan) -> None:
    """What parts share was taken off it, though it is frozen, and gradients on loan were as large as that."""
    subject, optimizer = replace(subject_of("fp32"), factory=adapted, plan=plan), partial(torch.optim.AdamW, lr=1e-3)
    numbers = replace(numbers_of(subject.precision, optimizer), dtype=torch.bfloat16)
    traced = profile(replace(subject, microbatch=1, plan=Plan()), {})
    on = cluster(hosts=1, count=2, memory=64 * GIB)
    asked = Search(Task(traced, on, 16, numbers, 2, pins={"recompute": "none"}))
    estimate = asked.estimate(Choice(Spread.of(plan), 2, zero=plan.zero))
    machine = Machine(1 << 40, 1 << 40, 2)
    counted = predict(dry_run(subject), optimizer, plan, subject.precision, machine, 4).need.total("device")
    trained = 9 * 2 * 256  # weights and biases of nine norms
    assert estimate.memory["optimizer state"] == pytest.approx(8 * trained / (2 if plan.zero else 1))
    assert estimate.bytes == pytest.approx(counted, rel=0.07)


def test_a_dry_run_says_as_much() -> None:
    subject = subject_of("bf16")
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    device = Device("toy", {"bf16": 1e13}, 1 << 40, 5e11)
    host = Host(device, 1, Link(5e-6, 1e10), 1 << 40, 1e10, disk=1e9, scratch="/tmp")
    traced = profile(replace(subject, microbatch=1), {})
    asked = Task(traced, Cluster("toy", (host,), Link(1e-5, 1e9)), 4, numbers_of(subject.precision, optimizer))
    host_bytes = 60 * MIB
    for away in (Offload(64 * MIB), Offload(64 * MIB, host_bytes, "/tmp"), Offload(64 * MIB, None, "/tmp", 0.5)):
        _, choice, estimate = priced(replace(asked, limit=64 * MIB), away)
        planned = replace(choice.plan({}), recompute="none")
        counted = predict(
            dry_run(replace(subject, plan=planned)), optimizer, planned, subject.precision, Machine(1 << 40, 1 << 40), 2
        ).need
        apart = 12 * MIB  # chunks are whole, and three pages at a time are on their way
        has = held_of(replace(asked, limit=64 * MIB), away)
        home = counted.total("host") - has.stays * 18 * traced.parameters
        assert estimate.on_host == pytest.approx(home, abs=apart)
        assert estimate.on_disk == pytest.approx(counted.total("disk"), abs=apart)
        assert counted.total("disk") > 0 or away.disk is None


@pytest.mark.parametrize("on_host", [False, True], ids=["devices", "cores"])
def test_what_a_plan_gives_the_host_is_a_limit(on_host: bool) -> None:
    """Plans that need more of it were found, and dry runs of each took half a minute to refuse them."""
    host = cluster().hosts[0]
    on = replace(cluster(), hosts=(replace(host, device=replace(host.device, on_host=on_host)),))
    home = search(task(pins={"memory": {}, "zero": 3, "dp": 4}, on=on)).best[0].on_host
    for given, fits in ((int(home) + 1, True), (int(home) - 1, False)):
        asked = task(pins={"memory": {"host": given}, "zero": 3, "dp": 4}, on=on)
        if fits:
            assert search(asked).best[0].on_host == pytest.approx(home)
        else:
            with pytest.raises(UserError, match=r"no plan fits: .* of its host for a rank, where .* are. Take more"):
                search(asked)

"""Values that no plan can have are refused where they are pinned, as the engine would refuse them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import auto_plan
from shoal.cli.answer import Options, answer_for
from shoal.comm import World
from shoal.errors import UserError
from shoal.jobs import asking
from shoal.jobs.choose import opened
from shoal.jobs.read import parse_job, plan_pins
from shoal.optim.groups import small_optimizer
from shoal.planner.ask import check_tokens, legal_degrees
from shoal.planner.confirm import confirm
from shoal.planner.degrees import Spread, degrees, ways
from shoal.planner.explain import fits, smallest, within_budget
from shoal.planner.pins import check_machine, check_pins
from shoal.planner.search import search
from shoal.planner.task import Estimate, Task
from tests.planner.models import cluster, model, task

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tpp": 2}, 'plan has no field "tpp". Did you mean "tp"?'),
    ({"tp": 0}, "plan.tp = 0: a degree is a whole number of at least 1"),
    ({"zero": 5}, "is not one of 0, 1, 2, 3"),
    ({"context": "rings"}, "is not one of 'ulysses', 'ring'"),
    ({"recompute": "ful"}, 'plan.recompute = "ful" is not one of none, full,'),
    ({"recompute": {"name": "budget"}}, '"budget" needs the parameter "keep"'),
    ({"recompute": {"name": "selective", "save": ["matmuls"]}}, "plan.recompute: save = ['matmuls']"),
    ({"recompute": {"name": "blocks", "full": "0-", "selective": 2}}, "plan.recompute: full = '0-'"),
    ({"schedule": "1f2b"}, 'plan.schedule = "1f2b" is none of gpipe'),
    ({"schedule": {"name": "zbv", "chunks": 3}}, "takes 2 chunks a rank, not 3"),
    ({"schedule": {"name": "interleaved", "chunks": "2"}}, "chunks = '2': give the number of stages of a rank"),
    ({"schedule": {"name": "file", "path": "mine"}}, "leaves nothing to search for"),
    ({"exchange": "bf61"}, 'plan.exchange = "bf61" is not implemented. Did you mean "bf16"?'),
    ({"memory": {"devise": "1GiB"}}, 'plan.memory has no key "devise". Did you mean "device"?'),
    ({"memory": {"device": "much"}}, "plan.memory.device = 'much': give bytes"),
    ({"placements": {"**.up": "colum"}}, "plan.placements['**.up'] = 'colum' is none of column"),
    ({"stages": [4, 4]}, "by --pin pp=2"),
    ({"stages": [2, 2, 2, 2]}, "by --pin pp=4"),
    ({"pp": 2, "stages": [2.5, 1.5]}, "plan.stages = [2.5, 1.5]: give a whole number of blocks for each stage"),
    ({"pp": 2, "stages": "counted"}, 'plan.stages = "counted": the planner cuts stages itself'),
    ({"dp": 4, "shard": 3}, "plan.shard = 3: that many of dp = 4 ranks share one copy of the state"),
    ({"dp": 1, "shard": 4, "zero": 3}, "plan.shard = 4: that many of dp = 1 ranks share one copy of the state"),
    ({"shard": 4, "zero": 0}, "plan.shard = 4 with plan.zero = 0: nothing is sharded"),
    ({"shard": 2, "shares": [1, 2, 3]}, "plan.shard = 2: that many of dp = 3 ranks share"),
    ({"dp": 2, "shares": [1, 2, 3]}, "are 3 numbers, and dp = 2 ranks share"),
    ({"shares": [-1, 2]}, "plan.shares = [-1, 2]: give each of the dp ranks a number from 0 on"),
    ({"buddy": "often"}, "plan.buddy = 'often': give the number of steps"),
]


@pytest.mark.parametrize(("pins", "said"), WRONG, ids=[str(pins) for pins, _ in WRONG])
def test_what_no_plan_can_have_is_refused(pins: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        check_pins(pins)


def test_what_a_plan_can_have_is_left_to_the_search() -> None:
    for pins in (
        {"tp": 2, "pp": 2, "stages": [3, 5], "schedule": {"name": "interleaved", "chunks": 4}},
        {"dp": 4, "shard": 2, "shares": [3, 1, 1, 1]},
        {"shard": 2, "shares": [3, 1], "ep": 8, "cp": 2, "context": "ring"},
        {"recompute": {"name": "blocks", "full": "0-11, 40", "selective": 8}, "memory": None, "placements": None},
        {"recompute": {"name": "blocks", "every": 2}, "schedule": "2bw", "memory": "auto", "exchange": "bytegrad"},
        {"placements": {"lm_head": "whole"}, "zero": 0, "memory": {"device": "2GiB", "disk": "/scratch"}},
        {"compile": True, "stages": None},
    ):
        check_pins(pins)


def test_a_backend_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match=r'plan.compile = .inducter. is no backend.*Did you mean "inductor"'):
        check_pins({"compile": "inducter"})


def test_nothing_is_traced_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shoal plan --on`, `plan = "auto"` of a job and `auto_plan` ask alike; models and data are not even there."""
    said = r'plan.recompute = "ful" is not one of .* Did you mean "full"'
    (tmp_path / "job.toml").write_text(
        '[model]\nname = "gpt"\npreset = "1m"\n[data]\nsource = "none"\n[train]\nsteps = 1\n'
    )
    with pytest.raises(UserError, match=said):
        answer_for(tmp_path / "job.toml", [], Options("8xh100", ["recompute=ful"]), True, None)
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)
    data = {"source": str(tmp_path / "text.txt"), "sequence": 16, "validation": 0.0}
    content = {"model": {"name": "gpt", "preset": "1m"}, "data": data, "train": {"steps": 1}}
    settled = opened(*parse_job({**content, "plan": {"name": "auto", "recompute": "ful"}}))
    monkeypatch.setattr(asking, "task_here", lambda *_: pytest.fail("it is traced"))
    with pytest.raises(UserError, match=said):
        asking.answer(settled, cluster(), True)
    sgd, row = partial(torch.optim.SGD, lr=0.1), {"inputs": torch.zeros(2)}
    with pytest.raises(UserError, match=said):
        auto_plan(
            lambda: pytest.fail("it is made"),
            lambda *_: pytest.fail("it is run"),
            sgd,
            row,
            global_batch=8,
            pins={"recompute": "ful"},
            world=World.single("cpu"),
            cluster=cluster(),
        )


def test_a_field_is_pinned_once() -> None:
    assert plan_pins(["memory=none"]) == {"memory": None}, "nothing lies elsewhere than on the device"
    assert plan_pins(["dp=2", "dp=2", "memory.device=1GiB", "memory.host=2GiB"])["dp"] == 2
    with pytest.raises(UserError, match="--pin dp=4: another --pin gives dp = 2: leave out one of them"):
        plan_pins(["dp=2", "tp=2", "dp=4"])
    for pins, said in (
        (["memory=none", "memory.device=1GiB"], "--pin memory.device=1GiB: another --pin gives memory = none"),
        (["memory.device=1GiB", "memory=none"], "--pin memory=none: another --pin gives memory = {'device': '1GiB'}"),
        (["memory.device=1GiB", "memory.device=2GiB"], "another --pin gives memory.device = '1GiB': leave out one"),
        (['memory={device="1GiB"}', "memory.device=2GiB"], "another --pin gives memory.device = '1GiB'"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            plan_pins(pins)


NONE_FIT: list[tuple[dict[str, Any], dict[str, Any], str, dict[str, Any] | None]] = [
    ({"dp": 5}, {}, "dp = 5 does not divide 8; leave out dp or take dp = 1 or 2 or 4 or 8", {"dp": 4}),
    ({"dp": 2, "tp": 3}, {}, "dp x tp = 6 does not divide 8; leave out tp or take tp = 1 or 2 or 4", {"dp": 2}),
    ({"dp": 5, "tp": 3}, {}, "dp x tp = 15 does not divide 8; leave out several of these", {}),
    (
        {"pp": 8},
        {},
        "into 6 stages at most, one for each of its blocks; leave out pp or take pp = 1 or 2 or 4",
        {"pp": 4},
    ),
    ({"pp": 4, "schedule": "zbv"}, {}, "; leave out pp or take pp = 1 or 2; or leave out schedule", {"pp": 4}),
    ({"pp": 2, "stages": [2, 2, 2]}, {}, "each of a block at least; leave out stages", {"pp": 2}),
    ({"stages": [6], "pp": 2}, {}, "each of a block at least; leave out stages", {"pp": 2}),
    ({"dp": 8}, {"rows": 4}, "each of 8 replicas has a row at least; leave out dp or take dp = 1 or 2 or 4", {"dp": 4}),
    (
        {"shard": 3, "zero": 1},
        {},
        "plan.shard = 3 of dp replicas share one copy of the state, and dp may be 1 or 2 or 4 or 8; "
        "leave out shard or take shard = 2 or 4 or 8",
        {"shard": 4, "zero": 1},
    ),
    ({"shares": [1, 1, 1]}, {}, "shares are 3 numbers, one for each of dp replicas, and dp may be 1 or 2", {"dp": 2}),
    (
        {"exchange": {"name": "islands", "ranks": 4}, "tp": 2},
        {},
        "what trains apart are islands of 4 replicas, of which there are two at least; leave out exchange; or leave",
        {"exchange": {"name": "islands", "ranks": 4}},
    ),
    (
        {"cp": 2, "tp": 4, "context": "ulysses"},
        {"legal": {"parts": 4, "tokens": 64, "heads": 4}},
        "4 heads do not come out even among 8 ranks; leave out cp or take cp = 1; or leave out tp or take tp = 1 or 2",
        {"cp": 2, "tp": 2},
    ),
    (
        {"cp": 8},
        {"legal": {"tokens": 12, "ring": 6}},
        "rows of 12 tokens do not come out even in 8 pieces; rows of 12 tokens do not come out even in 16 pieces; ",
        {"cp": 4},
    ),
    (
        {"cp": 4, "context": "ulysses"},
        {"legal": {"tokens": 64, "heads": 12, "keys": 3}},
        "3 heads of keys and values do not come out even among 4 ranks; leave out cp or take cp = 1; or leave",
        {"context": "ring"},
    ),
    ({"ep": 2}, {}, "with ep = 2: no experts; leave out ep", {"ep": 1}),
    ({"tp": 2}, {"on": cluster(1, 1)}, "with tp = 2: tp = 2 does not divide 1; leave out tp or take tp = 1", {}),
    ({}, {"rows": 4, "legal": {}, "profile": model(1)}, "take train.global_batch = 8, or fewer devices", None),
]


@pytest.mark.parametrize(("pins", "others", "said", "instead"), NONE_FIT, ids=[str(pins) for pins, *_ in NONE_FIT])
def test_what_stands_against_all_degrees_is_said_with_what_does(
    pins: dict[str, Any], others: dict[str, Any], said: str, instead: dict[str, Any] | None
) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as refusal:
        search(task(pins=pins, **others))
    assert "not asked for" not in str(refusal.value)
    more = {**others, "rows": 8} if instead is None else others
    assert search(task(pins=instead or {}, **more)).best


def test_an_exchange_that_is_pinned_goes_with_what_is_found() -> None:
    """Replicas that train apart have no stages and no shards: candidates of these were tried first, and no others."""
    for pins in ({"exchange": "diloco"}, {"exchange": "diloco", "tp": 2}):
        found = search(task(pins=pins)).best
        assert {(each.choice.zero, each.choice.spread.stages, each.choice.offload) for each in found} == {(0, 1, None)}
    asked = task(pins={"exchange": {"name": "islands", "ranks": 3}}, rows=24, on=cluster(1, 6))
    assert {each.choice.spread.replicas % 3 for each in search(asked).best} == {0}
    with pytest.raises(UserError, match="islands of 3 ranks do not divide 8"):
        search(task(pins={**asked.pins, "dp": 8}))
    said = '"diloco" does not go with plan.zero = 2: its replicas train apart.*Leave out one of these$'
    with pytest.raises(UserError, match=said):
        search(task(pins={"exchange": "diloco", "zero": 2}))


@pytest.mark.parametrize(("kind", "zero"), [(torch.optim.AdamW, {0}), (torch.optim.SGD, {0, 1})])
def test_an_exchange_that_goes_by_the_optimizer_does_so_where_it_is_asked(kind: Any, zero: set[int]) -> None:
    """Steps of AdamW are combined, gradients of SGD: each replica then needs all of its state, or does not."""
    small = partial(small_optimizer, partial(kind, lr=0.1), [{}])
    found = search(task(pins={"exchange": "adasum"}, optimizer=small)).best
    assert {each.choice.zero for each in found} == zero


def test_replicas_that_train_apart_are_several() -> None:
    """One alone is faster, as it sends nothing between hosts."""
    asked = task(pins={"exchange": {"name": "local_sgd", "every": 1}}, on=cluster(1, 2, inside=1e6))
    assert search(replace(asked, pins={})).best[0].choice.spread.copies == 1
    assert {each.choice.spread.copies for each in search(asked).best} == {2}
    with pytest.raises(UserError, match=r"of which there are two at least; leave out exchange"):
        search(replace(asked, pins={**asked.pins, "tp": 2}))


def test_room_is_looked_for_where_a_pinned_exchange_goes() -> None:
    for pins in ({"exchange": "diloco", "tp": 2}, {"exchange": "adasum", "zero": 1}):
        assert fits(task(pins=pins))


def test_ways_that_are_pinned_are_not_left_out_of_another_search() -> None:
    """Of tp and pp, refused together, pp is left out where tp is pinned: it was tp, to no end."""

    def look(_: Task, estimate: Estimate) -> tuple[None, str]:
        spread = estimate.choice.spread
        return None, "no stages beside parts" if spread.stages > 1 and spread.parts > 1 else ""

    asked = task(pins={"tp": 2, "dp": 1}, on=cluster(1, 4, inside=1e7))
    found = search(asked)
    assert all(each.choice.spread.stages == 2 for each in found.best)
    assert confirm(asked, found, look).estimate.choice.spread == Spread(tokens=2, parts=2)


def legal(row: int, heads: int = 0, keys: int = 0, size: int = 8) -> set[tuple[int, bool]]:
    """Into how many ranks rows may be dealt out, and whether in a ring, beside `size` devices."""
    values = {key: number for key, number in {"heads": heads, "kv_heads": keys}.items() if number}
    most = {**legal_degrees(values, model(), row, 8), "parts": 1}
    return {(each.tokens, each.ring) for each in degrees(size, most, {}) if each.tokens > 1}


def test_rows_are_dealt_out_wherever_they_come_out_even() -> None:
    """Half of a row was taken for what ranks have to divide, also where they deal out heads."""
    assert legal(64) == {(2, False), (4, False), (8, False), (2, True), (4, True), (8, True)}
    assert legal(66) == {(2, False)}, "four pieces of a ring do not come out even"
    assert legal(63, size=6) == {(3, False)}
    assert legal(8) == {(2, False), (4, False), (2, True), (4, True)}, "each of eight would have one token"
    assert legal(64, heads=4) == {(2, False), (4, False), (2, True), (4, True), (8, True)}
    assert legal(64, heads=12, keys=3) == {(2, True), (4, True), (8, True)}


def test_a_degree_that_does_not_divide_the_ranks_is_traced_as_one_that_is_not_pinned() -> None:
    """A model whose heads do not come out even among three was asked for nothing else, so no remedy had a number."""
    assert ways({"tp": 3}, 8) == {"parts": (2,), "tokens": (2,), "ring": (2,), "experts": (2,)}
    assert ways({"tp": 3}, 6)["parts"] == (3,) and ways({"cp": 1, "tp": 4}, 12) == {"parts": (2,), "experts": (2, 3)}


def test_rows_that_cannot_be_dealt_out_as_pinned_are_refused_before_a_trace() -> None:
    for pins, values, row, said in (
        ({"cp": 5}, {}, 64, "plan.cp = 5: rows of 64 tokens do not .*: take plan.cp = 1 or 2 or 4 or 8$"),
        ({"cp": 2}, {}, 33, "plan.cp = 2: rows of 33 tokens do not come out even in 2 pieces.*take plan.cp = 1 or 3"),
        ({"cp": 3, "context": "ring"}, {}, 33, 'in 6 pieces: take plan.cp = 1, or plan.context = "ulysses"$'),
        (
            {"cp": 2, "tp": 4, "context": "ulysses"},
            {"heads": 4},
            64,
            'plan.cp = 2 with plan.tp = 4: 4 heads do not .* 8 ranks: take plan.cp = 1, or plan.context = "ring"$',
        ),
        ({"cp": 8}, {}, 8, "rows of 8 tokens leave each of 8 ranks one.*take plan.cp = 1 or 2 or 4$"),
    ):
        with pytest.raises(UserError, match=said):
            check_tokens(pins, values, row, 24)
    for pins in ({"cp": 2, "tp": 4}, {"cp": 4, "context": "ulysses"}, {}):
        check_tokens(pins, {"heads": 4}, 64, 24)
    check_tokens({"cp": 2}, {}, None, 24)


def test_a_machine_of_one_island_is_refused() -> None:
    """Its ranks would never meet others, as without islands."""
    for exchange, ranks in (({"name": "islands", "ranks": 8}, 8), ("local_sgd", 1)):
        with pytest.raises(UserError, match=r"two at least.*: leave out exchange"):
            check_machine({"exchange": exchange}, ranks)
        check_machine({"exchange": exchange}, 2 * ranks)
    asked = task(pins={"exchange": {"name": "islands", "ranks": 2}}, on=cluster(1, 4, inside=1e6))
    assert {each.choice.spread.replicas for each in search(asked).best} == {4}
    assert smallest(asked) == 4, "on two it would be refused"


def test_a_budget_leaves_as_many_hosts_as_train_apart() -> None:
    asked = task(pins={"exchange": "diloco"}, on=cluster(4, 1, between=1e6))
    alone = asked.cluster.with_hosts(1)
    one = 1000 * search(replace(asked, cluster=alone)).best[0].seconds / 3600 * alone.price
    with pytest.raises(UserError, match="the cheapest takes"):
        within_budget(asked, 1.01 * one, lambda each: 1000 * each.seconds)
    assert within_budget(asked, 1000 * one, lambda each: 1000 * each.seconds).cluster.size > 1

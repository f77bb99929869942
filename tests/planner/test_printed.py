"""A plan as it is printed: read again it is the plan that was found, and who asks with all of it given finds it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cli.answer import toml
from shoal.errors import UserError
from shoal.plan import Plan
from shoal.planner.search import search
from shoal.planner.task import Task
from tests.planner.models import GIB, MIB, cluster, model, task

PINS: list[dict[str, Any]] = [
    {},
    {"zero": 0},
    {"exchange": "allreduce", "schedule": "1f1b"},
    {"recompute": {"name": "selective", "save": ["attention"]}},
    {"recompute": {"name": "blocks", "full": "1", "selective": 2}, "pp": 2},
    {"memory": {"device": "300MiB", "host": "2GiB", "disk": "/scratch"}, "recompute": "none"},
    {"shares": [1, 3], "zero": 1},
]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    hosts, count = draw(st.sampled_from([(1, 2), (2, 2), (2, 1), (1, 4)]))
    on = cluster(
        hosts, count, draw(st.sampled_from([0.2, 0.4, 0.8, 3])) * GIB, between=draw(st.sampled_from([1e8, 1e10]))
    )
    rates = {"to_host": draw(st.sampled_from([1e9, 5e10])), "disk": draw(st.sampled_from([1e9, 1e10]))}
    host = replace(on.hosts[0], memory=draw(st.sampled_from([1, 64])) * GIB, scratch="/scratch", **rates)
    host = replace(host, device=replace(host.device, on_host=draw(st.booleans())))
    more = {"compiled": draw(st.booleans()), "pins": draw(st.sampled_from(PINS))}
    more["exchanges"] = draw(st.sampled_from([("allreduce",), ("allreduce", "bf16")]))
    profile = model(
        draw(st.sampled_from([2, 5])), draw(st.sampled_from([1e7, 5e7])), draw(st.sampled_from([8, 64])) * MIB
    )
    return task(profile, replace(on, hosts=(host,) * hosts), draw(st.sampled_from([8, 12])), **more)


@settings(max_examples=25, deadline=None)
@given(tasks())
def test_a_plan_that_is_printed_is_found_again(asked: Task) -> None:
    try:
        best = search(asked).best[0]
    except UserError:
        return  # nothing fits
    plan = best.choice.plan(asked.pins)
    job = SimpleNamespace(train=SimpleNamespace(sync_bn=False, microbatch=asked.microbatch))
    chosen: Any = SimpleNamespace(plan=plan, task=asked, estimate=best, settled=SimpleNamespace(job=job))
    printed = tomllib.loads(toml(chosen))
    assert Plan.from_dict(printed["plan"]) == plan
    again = search(replace(asked, pins=printed["plan"], microbatch=printed["train"]["microbatch"])).best[0]
    assert again.choice.plan(printed["plan"]) == plan
    assert (again.seconds, again.bytes) == pytest.approx((best.seconds, best.bytes), rel=1e-4)  # budgets are rounded

"""Layers that are better left whole along tp: the best of all choices of groups, and what the planner makes of them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from shoal.cli.answer import lines, toml
from shoal.jobs.asking import asked
from shoal.jobs.choose import opened
from shoal.jobs.read import parse_job
from shoal.parallel.tensor.pins import CUT_AS
from shoal.plan import Plan
from shoal.planner.cluster import Cluster, Device, Host, Link
from shoal.planner.explain import explain
from shoal.planner.layers import layers_of
from shoal.planner.operators import problem_of, traced
from shoal.planner.placements import best
from shoal.planner.prepare import Subject
from shoal.precision import precision
from tests.planner.placing import MODELS, rates


@pytest.mark.parametrize("bandwidth", [1e12, 2e10, 1e9])
def test_what_stays_whole_is_the_best_of_all_choices(bandwidth: float):
    entry = MODELS["gpt"]()
    subject = Subject(entry.factory, entry.loss, entry.samples()[0], 16, precision("fp32"))
    found, problem = layers_of(subject, rates(bandwidth)), problem_of(traced(subject), rates(bandwidth))
    fixed = dict.fromkeys(problem.layers, "whole")
    seconds = []
    for cut in product([True, False], repeat=len(found.groups)):
        chosen = dict(fixed)
        for group, is_cut in zip(found.groups, cut, strict=True):
            for pattern, kind in zip(group.layers, group.kinds, strict=True):
                chosen |= {pattern.replace("*", str(block)): CUT_AS[kind] for block in range(2) if is_cut}
        chosen = {name: what for name, what in chosen.items() if name in problem.layers}
        seconds.append(best(problem, chosen, {"data"}).seconds)
    assert found.chosen == pytest.approx(min(seconds), rel=1e-9) and found.cut == pytest.approx(seconds[0])
    assert found.least <= found.chosen
    if bandwidth != 2e10:
        assert bool(found.whole) == (bandwidth < 1e12)
    given = layers_of(subject, rates(bandwidth), {"**.up": "column"})
    assert not {"blocks.*.mlp.up", "blocks.*.mlp.down"} & given.whole.keys()


def test_the_planner_leaves_whole_what_a_slow_link_makes_dear(tmp_path: Path):
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)
    model = {"name": "gpt", "layers": 2, "d_model": 32, "heads": 4, "vocab_size": 257}
    data = {"source": str(tmp_path / "text.txt"), "sequence": 16, "validation": 0.0}
    plan = {"name": "auto", "tp": 2, "placements": {"blocks.0.mlp.up": "column"}}
    content = {"model": model, "data": data, "train": {"steps": 4, "global_batch": 8}, "plan": plan}
    device = Device("cores", {"fp32": 1e11}, 8 << 30, 1e10, launch=1e-6, on_host=True)
    slow = Cluster("here", (Host(device, 2, Link(1e-3, 1e8), 8 << 30, 5e9),), Link(1e-3, 1e8), 0.3)
    chosen = asked(opened(*parse_job(content)), slow)
    placements = dict(chosen.plan.placements or {})
    assert placements["head"] == "whole" and placements["blocks.0.mlp.up"] == "column" and chosen.plan.tp == 2
    assert chosen.layers is not None and any(group.pinned for group in chosen.layers.groups)
    assert Plan.from_dict(tomllib.loads(toml(chosen))["plan"]) == chosen.plan
    assert list(lines(chosen, explain(chosen.task, chosen.estimate, chosen.others, margins=False)))
    fast = replace(slow, hosts=(replace(slow.hosts[0], inside=Link(1e-9, 1e13)),))
    assert asked(opened(*parse_job(content)), fast).plan.placements == {"blocks.0.mlp.up": "column"}

"""What `pp` makes of the times of actions, and of its samples."""

from __future__ import annotations

import pytest

from benchmarks import pp
from benchmarks.targets import judge
from shoal.pipeline import Costs, simulate


def test_the_limit_is_the_schedule_with_what_its_actions_take():
    ranks = [{"F0": 0.1, "B0": 0.2, "rest": 0.01}, {"F1": 0.1, "B1": 0.2, "rest": 0.5}]
    # the rest of the faster one has a wait in it
    assert pp.limit_of("1f1b", ranks) == pytest.approx((8 + 1) * 0.3 + 0.01)
    halves = [{f"{kind}{stage}": 0.1 for kind in "FIW"} | {f"B{stage}": 0.2, "rest": 0.0} for stage in range(2)]
    schedule = pp.schedule_of("zb1p")
    assert pp.limit_of("zb1p", halves) == pytest.approx(0.1 * simulate(schedule, Costs.even(2)).seconds)
    halves[0]["B0"] = 0.3  # what it was seen to take, not the sum of two halves
    assert pp.limit_of("zb1p", halves) > 0.1 * simulate(schedule, Costs.even(2)).seconds + 0.5


def test_figures_are_those_that_targets_name():
    row = {"share": 0.98, "samples_ms": [[100.0], [102.0]]}
    results = [
        {
            "precision": "fp32",
            "case": name,
            "contenders": {
                "shoal": row,
                **({"torch": {"share": 0.9, "samples_ms": [[110.0], [112.2]]}} if pp.THEIRS[name] else {}),
            },
        }
        for name in pp.SCHEDULES
    ]
    judged = {each["key"]: (each["measured"], each["reached"]) for each in judge(pp.TARGETS, pp.figures(results))}
    assert judged["fp32 1f1b limit"] == (0.98, True) and judged["fp32 zbv torch"] == (pytest.approx(1.1), True)
    assert judged["bf16 gpipe limit"] == (None, None) and "fp32 zb1p torch" not in judged


def test_both_sides_cut_between_the_same_blocks():
    for name in pp.SCHEDULES:
        assert (
            sum(pp.STAGES[name]) == pp.build_model().cfg.layers and len(pp.STAGES[name]) == pp.schedule_of(name).stages
        )

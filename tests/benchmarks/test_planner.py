"""The published rows: what is said of them can be checked by counting, they are predicted, and the search is not slower
than their plans."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial

import pytest

from benchmarks import planner
from benchmarks.planner import mean_errors
from benchmarks.planner_published import (
    MEGATRON,
    MODELS,
    ROWS,
    Published,
    as_there,
    estimated,
    task_of,
    traced,
    ways_of,
)
from benchmarks.planner_ranking import spearman, thinned
from shoal.planner.degrees import Spread
from shoal.planner.profile import Profile
from shoal.planner.search import Search, search
from shoal.planner.task import Choice, Estimate


@cache
def profile_of(name: str) -> Profile:
    return traced(MODELS[name], ways_of(name))


QUICK = ("mpt-1b", "gpt-175b")
EVERY = [
    row if row.model in QUICK and row.devices == 8 else pytest.param(row, marks=pytest.mark.matrix) for row in ROWS
]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix) for name in MODELS]
)
def test_a_model_has_the_parameters_that_were_published(name: str) -> None:
    published, counted = MODELS[name].parameters, profile_of(name).parameters
    assert counted == published if published else counted > 0


@pytest.mark.parametrize("row", EVERY, ids=lambda row: f"{row.source} {row.name} {row.rows} {row.choice.recompute}")
def test_the_search_is_not_slower_than_a_published_plan(row: Published) -> None:
    found = profile_of(row.model)
    by_hand, rate = estimated(row, found)
    task = task_of(row, found)
    best = search(task_of(row, found, limit=max(task.most, (1 + 1e-9) * by_hand.bytes))).best[0]
    assert best.seconds <= by_hand.seconds * (1 + 1e-9)
    assert abs(row.rate / rate - 1) < 0.25


def megatron(copies: int) -> Choice:
    """As NVIDIA trains Llama-70B on 64 to 2,048 H100 (github.com/NVIDIA/dgxc-benchmarking, llama3.1/README_70b.md)."""
    return Choice(Spread(4, copies, 2, 4, ring=True), 1, 1, schedule="interleaved", chunks=5)


BY_HAND = [
    ("llama-70b", "h100x16", 64, Choice(Spread(stages=2, parts=8), 1, 1)),
    ("llama-70b", "h100x1024", 1024, megatron(32)),
    ("llama-70b", "h100x16384", 4096, megatron(512)),
    ("deepseek-v3", "h100x2048", 4096, Choice(Spread(stages=16, copies=128, experts=64), 1, 1)),
]
"""Plans of models that are asked for on clusters: of DeepSeek-V3 the degrees of arXiv 2412.19437, section 3.2."""
whole = cache(planner.traced)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "machine", "rows", "choice"), BY_HAND)
def test_the_search_is_not_slower_than_a_plan_made_by_hand(name: str, machine: str, rows: int, choice: Choice) -> None:
    task = planner.task_of(name, machine, rows, whole(name))
    by_hand = Search(replace(task, limit=math.inf))
    taken = by_hand.simulated(by_hand.estimate(choice))
    schedules = (*task.schedules, (choice.schedule, choice.chunks))
    best = search(replace(task, limit=max(task.most, (1 + 1e-9) * taken.bytes), schedules=schedules)).best[0]
    assert 0 < best.seconds <= taken.seconds * (1 + 1e-9)


def test_blocks_of_a_published_row_end_as_their_system_ends_them() -> None:
    row = next(row for row in ROWS if row.source == MEGATRON)
    found = profile_of(row.model)
    block = next(part for part in found.parts if part.is_block)
    assert block.spared == pytest.approx(1 / 3)  # the last product of a GELU's MLP: 8 of 24 d^2
    task = partial(replace, task_of(row, found))
    ours, theirs = (Search(task(profile=each)) for each in (found, as_there(row, found)))
    assert theirs.estimate(row.choice).seconds > ours.estimate(row.choice).seconds


def test_mean_errors() -> None:
    rows = [
        {"row": "a on 8 h100", "source": "x", "error": 0.1, "published_gib": None, "predicted_gib": 1.0},
        {"row": "b on 8 h100", "source": "x", "error": -0.3, "published_gib": 2.0, "predicted_gib": 3.0},
    ]
    found = mean_errors(rows)
    assert found == {"x h100": pytest.approx(0.2), "together": pytest.approx(0.2), "memory": pytest.approx(0.5)}


@pytest.mark.fast
def test_the_correlation_of_ranks() -> None:
    assert spearman([1.0, 2.0, 3.0], [10.0, 40.0, 90.0]) == pytest.approx(1)
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert spearman([1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert spearman([1.0, 1.0], [1.0, 2.0]) == 0


@pytest.mark.fast
def test_plans_at_even_distances_and_the_first_by_each_measurement_are_run() -> None:
    def measured(**first: float) -> dict[Choice, Estimate]:
        choices = [Choice(Spread(), microbatch) for microbatch in range(1, 10)]
        return {
            each: Estimate(each, {"compute": first.get(f"b{each.microbatch}", 1.0)}, {}, 0, 0, {}, 1)
            for each in choices
        }

    found = thinned([measured(b2=0.5), measured(b8=0.5), measured(b2=0.4)], 3)
    assert [key.microbatch for key in found] == [1, 2, 5, 8, 9]
    assert found[Choice(Spread(), 8)].seconds == 1.0  # as it was first measured
    assert len(thinned([measured()], 0)) == len(thinned([measured()], 50)) == 9

"""Of hundreds of plans, each run once, the choice is judged by those that run again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import planner_survey
from benchmarks.planner_survey import FINALISTS, FINALS, NEAR, finals
from shoal.planner.degrees import Spread
from shoal.planner.task import Choice

PLANS = [Choice(Spread(), microbatch) for microbatch in range(1, 20)]


def rows(measured: dict[Choice, float], predicted: dict[Choice, float]) -> list[dict[str, Any]]:
    return [
        {"key": key, "measured_ms": taken, "predicted_ms": predicted.get(key, 99.0)} for key, taken in measured.items()
    ]


def run_again(monkeypatch: pytest.MonkeyPatch, taken: dict[Choice, list[float]]) -> None:
    """A plan takes these milliseconds, turn by turn; one that is not named is not to run."""
    left = {key: iter(each) for key, each in taken.items()}
    monkeypatch.setattr(planner_survey, "turn", lambda name, group, estimate, steps: [[next(left[estimate.choice])]])


def test_what_was_fastest_by_luck_is_not_what_the_choice_is_held_against(monkeypatch: pytest.MonkeyPatch) -> None:
    luck, best, chosen, slow = PLANS[:4]
    given = rows({luck: 10.0, best: 10.5, chosen: 12.0, slow: 10 * (1 + NEAR) + 0.1}, {chosen: 9.0})
    found: Any = {key: SimpleNamespace(choice=key) for key in PLANS}
    once_slow = [50.0, *(FINALS - 1) * [10.0]]
    run_again(monkeypatch, {luck: FINALS * [11.0], best: once_slow, chosen: FINALS * [10.2]})
    assert finals("gpt", None, given, found) == pytest.approx(0.02)  # type: ignore[arg-type]


def test_a_choice_that_is_the_fastest_is_held_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many that are near as many run as there are places, and the choice whatever it took."""
    found: Any = {key: SimpleNamespace(choice=key) for key in PLANS}
    given = rows({key: 10 + place / 100 for place, key in enumerate(PLANS)}, {PLANS[-1]: 1.0})
    again = [*PLANS[:FINALISTS], PLANS[-1]]
    run_again(monkeypatch, {key: FINALS * [9.0 if key is PLANS[-1] else 10.0] for key in again})
    assert finals("gpt", None, given, found) == 0  # type: ignore[arg-type]

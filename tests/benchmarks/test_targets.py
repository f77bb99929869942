"""Targets are lines to read."""

from __future__ import annotations

import pytest

from benchmarks.targets import Target, judge, line, print_targets

FASTER = Target("speed", "times faster", 6)
SLOWER = Target("cost", "step time", 1.03, at_least=False)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("target", "figure", "expected"),
    [(FASTER, 6.0, True), (FASTER, 5.99, False), (SLOWER, 1.03, True), (SLOWER, 1.04, False)],
)
def test_a_bound_is_reached_from_its_side(target: Target, figure: float, expected: bool) -> None:
    assert target.reached(figure) is expected


def test_what_a_run_did_not_measure_is_neither_reached_nor_missed() -> None:
    fast, cost = judge([FASTER, SLOWER], {"speed": 7.0})
    assert (fast["measured"], fast["reached"]) == (7.0, True)
    assert (cost["measured"], cost["reached"]) == (None, None)


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    missed, met, unknown = (*judge([FASTER, SLOWER], {"speed": 5.0, "cost": 1.0}), *judge([SLOWER], {}))
    assert line(missed) == "not reached      5.00x, wanted at least 6x   : times faster"
    assert line(met) == "reached          1.00x, wanted at most 1.03x : step time"
    assert line(unknown).startswith("not measured         -, wanted")
    print_targets([missed, met])
    assert capsys.readouterr().out.splitlines() == [line(missed), line(met)]

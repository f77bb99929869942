"""The harness's arithmetic on contenders that take no time."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Samples, idle_warnings, measure, quartiles, result_of, summarise


class Fake:
    """Takes turns by reading figures from a list; `idle` CPU seconds pass whenever somebody asks."""

    def __init__(self, name: str, turns: list[list[float]], diary: list[tuple[str, int]], idle: float = 0.0) -> None:
        self.name, self.turns, self.diary, self.idle = name, iter(turns), diary, idle
        self.cpu = 0.0

    def turn(self, steps: int) -> list[float]:
        self.diary.append((self.name, steps))
        return next(self.turns)

    def cpu_seconds(self) -> float:
        self.cpu += self.idle
        return self.cpu


@pytest.mark.fast
def test_contenders_are_interleaved() -> None:
    diary: list[tuple[str, int]] = []
    contenders = {name: Fake(name, [[1.0], [2.0]], diary) for name in "ABC"}
    samples = measure(contenders, rounds=2, steps=5)
    assert diary == [("A", 5), ("B", 5), ("C", 5), ("A", 5), ("B", 5), ("C", 5)]
    assert samples.rounds == {name: [[1.0], [2.0]] for name in "ABC"}


@pytest.mark.fast
def test_a_ratio_is_of_figures_of_the_same_round() -> None:
    # The machine is twice as slow in round 2. Round medians: limit 10, 20, 10; own 20, 25, 10. Shares 0.5, 0.8, 1.0.
    samples = Samples(
        {"limit": [[9.0, 10.0, 30.0], [20.0], [10.0]], "own": [[20.0], [25.0, 25.0], [5.0, 10.0, 10.0]]},
        {"limit": 0.0, "own": 0.0},
    )
    rows = summarise(samples, "limit")
    assert rows["own"].share == 0.8
    assert rows["own"].share_range == (0.5, 1.0)
    assert rows["own"].median_ms == 20.0
    assert rows["own"].quartiles_ms == (15.0, 22.5)
    assert rows["limit"].share_range == (1.0, 1.0)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("figures", "expected"),
    [([7.0], (7.0, 7.0, 7.0)), ([3.0, 1.0], (1.5, 2.0, 2.5)), ([5.0, 1.0, 3.0, 2.0, 4.0], (2.0, 3.0, 4.0))],
)
def test_quartiles(figures: list[float], expected: tuple[float, float, float]) -> None:
    assert quartiles(figures) == expected


@pytest.mark.fast
def test_a_contender_that_is_busy_while_others_run_is_named() -> None:
    diary: list[tuple[str, int]] = []
    contenders = {"quiet": Fake("quiet", [[1.0]], diary), "busy": Fake("busy", [[1.0]], diary, idle=1.0)}
    (warning,) = idle_warnings(measure(contenders, rounds=1, steps=1))
    assert warning.startswith("busy used")


@pytest.mark.fast
def test_the_record_has_every_sample_and_prints(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    samples = Samples({"limit": [[1.0, 3.0], [2.0]], "own": [[4.0], [4.0]]}, {"limit": 0.0, "own": 0.5})
    result = result_of(
        samples, "limit", {"limit": "nothing", "own": "something"}, case="small", precision="fp32", steps=2
    )
    record = json.loads(
        harness.write_record("question", {"rounds": 2}, [result], packages=("no-such-package",)).read_text()
    )
    assert record["results"][0]["contenders"]["limit"]["samples_ms"] == [[1.0, 3.0], [2.0]]
    assert record["results"][0]["contenders"]["own"]["share"] == 0.5
    assert record["versions"]["no-such-package"] == "not installed"
    assert {"date", "commit", "machine", "arguments"} < set(record)
    home = harness.write_record("of-a-disk", {}, [str(Path.home() / "pages")])
    assert json.loads(home.read_text())["results"] == ["~/pages"]
    quick = harness.write_record("question", {"quick": True}, [])
    assert quick.parent.name == "quick" and harness.read_record("question") == record, "a quick run is no record"

    harness.print_table(record["results"][0])
    printed = capsys.readouterr().out
    assert "limit (limit)" in printed
    assert "own used 50.0% of a core" in printed


@pytest.mark.fast
def test_contenders_may_take_turns_of_their_own_length() -> None:
    diary: list[tuple[str, int]] = []
    contenders = {name: Fake(name, [[1.0]], diary) for name in "AB"}
    measure(contenders, rounds=1, steps={"A": 3, "B": 50})
    assert diary == [("A", 3), ("B", 50)]


@pytest.mark.fast
def test_the_mean_counts_what_comes_seldom() -> None:
    samples = Samples({"limit": [[1.0, 1.0, 1.0]], "seldom": [[1.0, 1.0, 10.0]]}, {"limit": 0.0, "seldom": 0.0})
    assert summarise(samples, "limit")["seldom"].median_ms == 1.0
    assert summarise(samples, "limit", statistics.fmean)["seldom"].median_ms == 4.0
    assert (
        result_of(samples, "limit", {"limit": "", "seldom": ""}, statistics.fmean)["contenders"]["seldom"]["share"]
        == 0.25
    )


@pytest.mark.fast
def test_a_choice_of_names() -> None:
    parse = harness.several(["2", "4"])
    assert parse("4,2") == ["4", "2"]
    with pytest.raises(argparse.ArgumentTypeError, match="'3' is not one of 2, 4"):
        parse("2,3")

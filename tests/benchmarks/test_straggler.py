"""The arithmetic of `straggler`."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from benchmarks import harness, straggler
from benchmarks.harness import Samples
from benchmarks.mlp import ROWS
from benchmarks.straggler import CONTENDERS, Whole, ms_a_sample, sleep_of_the_slow, steps_by_rank, table
from shoal.exchange import algorithm

pytestmark = pytest.mark.fast


def test_who_goes_at_its_own_pace_does_five_steps_meanwhile() -> None:
    assert steps_by_rank(8, 3, own_pace=True) == [40, 40, 8]
    assert steps_by_rank(8, 3, own_pace=False) == [8, 8, 8]


def test_the_slow_rank_sleeps_four_steps() -> None:
    assert sleep_of_the_slow(50.0, 3) == (0.0, 0.0, 200.0)


def test_the_whole_counts_until_its_last_rank_is_done() -> None:
    # 4 steps of 10 ms and 1 of 60 ms: 5 steps of ROWS samples in 60 ms
    assert ms_a_sample([[10.0] * 4, [60.0]]) == 60.0 / (5 * ROWS)


def test_a_turn_asks_each_rank_for_its_steps() -> None:
    asked: list[list[int]] = []

    class Ranks:
        def turns(self, counts: list[int]) -> list[list[float]]:
            asked.append(counts)
            return [[10.0] * count for count in counts]

        def cpu_seconds(self) -> float:
            return 0.0

    assert Whole(Ranks(), 2, True).turn(2) == [100.0 / (12 * ROWS)]  # type: ignore[arg-type]
    assert asked == [[10, 2]]


def test_exchanges_exist_and_one_of_them_is_the_target_s() -> None:
    assert all(algorithm(entry.exchange) for entry in CONTENDERS.values())
    assert {target.key for target in straggler.TARGETS} <= set(CONTENDERS)
    assert [name for name, entry in CONTENDERS.items() if entry.own_pace] == ["async_average"]


def test_the_table_shows_samples_a_second() -> None:
    samples = Samples(
        {"allreduce": [[10.0], [10.0]], "async_average": [[4.0], [4.0]]}, {"allreduce": 0.0, "async_average": 0.0}
    )
    notes = {"allreduce": "", "async_average": ""}
    result = harness.result_of(samples, "allreduce", notes, ranks=2, steps=8, step_ms=50.0, slowdown=5)
    console = Console(file=StringIO(), width=160)
    console.print(table(result))
    (row,) = (line for line in console.file.getvalue().splitlines() if "async_average" in line)
    assert [cell.strip() for cell in row.split("│")[2:5]] == ["250", "250..250", "2.50"]

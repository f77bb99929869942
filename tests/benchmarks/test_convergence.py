"""Which exchanges `convergence` trains with, and the page that it writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import convergence_stages
from benchmarks.convergence import Setting, exchanges
from benchmarks.convergence_page import differences, markdown, plot
from shoal.exchange import algorithm
from shoal.exchange.named import ALGORITHMS
from shoal.models.presets import count_parameters
from shoal.plan import option_name

pytestmark = pytest.mark.fast


def row(replicas: int, name: str, losses: list[float], exchange: object = None, error: str | None = None) -> dict:
    return {
        "replicas": replicas,
        "name": name,
        "exchange": exchange or name,
        "losses": losses,
        "seconds": 1.0,
        "error": error,
    }


ROWS = [
    row(2, "allreduce", [2.0, 3.0]),
    row(2, "topk", [2.5, 3.1], {"name": "topk", "ratio": 0.01}),
    row(2, "adasum", [], error="KeyError: 3"),
    row(2, "diloco", [2.0, float("nan")]),
    row(4, "allreduce", [2.0, 2.0]),
    row(4, "topk", [1.9, 1.8], {"name": "topk", "ratio": 0.02}),
]
RECORD = {
    "date": "2030-01-02T03:04:05+00:00",
    "commit": "0123456789" * 4 + "+changes",
    "machine": {"cpu": "a processor", "cores": 2},
    "versions": {"torch": "2.13.0"},
    "results": {
        "setting": {
            "steps": 240,
            "global_batch": 8,
            "lr": 0.001,
            "clip": 1.0,
            "model": {"layers": 5, "d_model": 128, "sequence": 64},
        },
        "rows": ROWS,
    },
}


def test_every_algorithm_is_there_with_parameters_that_it_takes() -> None:
    for replicas in (2, 4):
        rows = exchanges(replicas, steps=240)
        assert all(algorithm(exchange) for exchange in rows.values())
        assert {option_name(exchange, "exchange") for exchange in rows.values()} == set(ALGORITHMS) - (
            {"islands"} if replicas == 2 else set()
        )


def test_schedules_within_a_run_fit_it() -> None:
    rows = {name: algorithm(exchange) for name, exchange in exchanges(4, steps=240).items()}
    assert rows["qadam"].warmup == rows["post_local_sgd"].start == 48
    assert 240 % rows["diloco"].every == 0


def test_the_model_has_about_a_million_parameters() -> None:
    assert 0.9e6 < count_parameters(Setting().model) < 1.2e6


def test_differences_are_to_the_same_seed_and_number_of_replicas() -> None:
    assert differences(ROWS[1], ROWS) == pytest.approx([0.5, 0.1])
    assert differences(ROWS[5], ROWS) == pytest.approx([-0.1, -0.2])
    assert differences(ROWS[2], ROWS) == [] == differences(ROWS[1], ROWS[1:2])


def test_the_page() -> None:
    lines = markdown(RECORD).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table[0] == (
        "| exchange | parameters | loss, 2 replicas | against exact (min..max) | loss, 4 replicas | against exact "
        "(min..max) |"
    )
    assert len({line.count("|") for line in table}) == 1
    assert table[2:] == [
        "| `allreduce` |  | 2.5000 | - | 2.0000 | - |",
        '| `topk` | `"ratio": 0.01` / `"ratio": 0.02` | 2.8000 | +0.3000 (+0.1000..+0.5000) | 1.8500 | -0.1500 '
        "(-0.2000..-0.1000) |",
        "| `adasum` |  | failed: KeyError: 3 | - | - | - |",
        "| `diloco` |  | diverged | - | - | - |",
    ]
    assert "2030-01-02, commit 0123456789+changes, torch 2.13.0" in markdown(RECORD)


def test_the_picture_is_drawn_without_what_failed(tmp_path: Path) -> None:
    plot(RECORD, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_delayed_updates_are_held_against_the_flush_of_as_many_stages(tmp_path: Path) -> None:
    rows = [
        {"stages": stages, "name": name, "finals": finals, "curves": [[(1, 3.0), (2, 2.5)]] * 2}
        for stages, name, finals in [
            (2, "1f1b", [2.0, 3.0]),
            (2, "2bw", [2.5, 3.25]),
            (4, "1f1b", [1.0, 1.0]),
            (4, "2bw", [2.0, 2.5]),
        ]
    ]
    assert convergence_stages.differences(rows[1], rows) == [0.5, 0.25]
    assert convergence_stages.differences(rows[3], rows) == [1.0, 1.5]
    cells = [list(column.cells) for column in convergence_stages.table(rows).columns]
    assert cells[3] == ["-", "+0.3750 (+0.2500..+0.5000)", "-", "+1.2500 (+1.0000..+1.5000)"]
    convergence_stages.plot(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_every_schedule_without_a_flush_is_there() -> None:
    assert {option_name(row.schedule, "schedule") for row in convergence_stages.ROWS.values()} == {
        "1f1b",
        "2bw",
        "pipedream",
    }
    assert all(row.microbatches == 1 for name, row in convergence_stages.ROWS.items() if name.startswith("pipedream"))

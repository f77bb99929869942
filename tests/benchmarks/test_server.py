"""Figures, table and targets of `server`."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from benchmarks import harness
from benchmarks.harness import Samples
from benchmarks.server import CARRIERS, CASES, CREWS, TARGETS, figures, table
from benchmarks.server_contenders import POLICIES
from shoal.server import Batch, Sync

pytestmark = pytest.mark.fast


def results() -> dict:
    """rpc takes 10 and 20 ms, shared memory 1 and 10, the sockets of both 4 and 8; Async is 3 and 5 times Sync."""
    turns = {
        "shared memory": [[1.0], [10.0]],
        "sockets": [[4.0], [8.0]],
        "rpc": [[10.0], [20.0]],
        "rpc sockets": [[8.0], [8.0]],
    }
    samples = Samples(turns, dict.fromkeys(turns, 0.0))
    notes = dict.fromkeys(turns, "")
    rates = {name: [10.0, 10.0] for name in POLICIES} | {"Async": [30.0, 50.0]}
    return {
        "messages": [harness.result_of(samples, "rpc", notes, case=case, steps=1) for case in CASES],
        "policies": {crew: rates for crew, _, _ in CREWS},
        "rows": {"sockets": {"pulled": [1e6, 2e6], "pushed": [1e5, 2e5]}},
    }


def test_ratios_are_of_one_round_and_every_target_is_measured() -> None:
    found = figures(results())
    assert found["round trip sockets rpc sockets"] == pytest.approx(1 / ((2 + 1) / 2))
    assert found["round trip shared memory rpc"] == pytest.approx(1 / ((10 + 2) / 2))
    assert found["straggler Async Sync"] == 4.0
    assert {target.key for target in TARGETS} <= set(found)


def test_the_table_has_a_row_for_each_figure() -> None:
    console = Console(file=StringIO(), width=160)
    console.print(table(results()))
    text = console.file.getvalue()
    assert sum(text.count(f" {unit} ") for unit in ("us", "ms")) == len(CASES) * len(CARRIERS)
    assert text.count("gradients/s") == len(CREWS) * len(POLICIES) and "1,500,000.0" in text


def test_policies_wait_for_the_workers_that_there_are() -> None:
    assert POLICIES["Sync"](3) == Sync(3) and POLICIES["Batch"](3) == Batch(k=3)

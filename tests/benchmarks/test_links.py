"""Turns, ratios and targets of `links`."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from benchmarks import harness, links
from benchmarks.harness import Samples
from benchmarks.links import CONTENDERS, LIMIT, LINKS, PEER, PERIOD, TARGETS, figures, table, turn_steps
from shoal.exchange import algorithm

pytestmark = pytest.mark.fast


def result() -> dict:
    """DDP takes 10 and 20 ms; u8 a step of 1 and one of 3, then two of 10; the limit 1 and 2."""
    samples = Samples(
        {PEER: [[10.0, 10.0], [20.0, 20.0]], "u8": [[1.0, 3.0], [10.0, 10.0]], LIMIT: [[1.0], [2.0]]},
        dict.fromkeys((PEER, "u8", LIMIT), 0.0),
    )
    notes = dict.fromkeys((PEER, "u8", LIMIT), "")
    return harness.result_of(samples, PEER, notes, figure=links.statistics.fmean, link="1gbit", steps={})


def test_exchanges_that_are_rare_get_whole_periods() -> None:
    for link in LINKS.values():
        for quick in (True, False):
            assert turn_steps(CONTENDERS["diloco"], link, quick) % PERIOD == 0
    assert turn_steps(CONTENDERS[PEER], LINKS["100mbit"], quick=False) == 3
    assert turn_steps(CONTENDERS[PEER], LINKS["10gbit"], quick=True) == 2


def test_every_exchange_exists_with_its_parameters() -> None:
    made = {
        name: algorithm(entry.build.args[0])
        for name, entry in CONTENDERS.items()
        if getattr(entry.build, "func", None) is links.mlp.shoal
    }
    assert set(CONTENDERS) - set(made) == {"ddp", "ddp-fp16"}
    assert (made["diloco"].every, made["diloco"].codec) == (PERIOD, "fp16")
    assert (made["u4+ef"].codec, made["u4+ef"].error_feedback) == ("u4", True)
    assert made["async"].interval_ms == 500


def test_a_ratio_is_of_round_means() -> None:
    found = figures([result()])
    assert found["1gbit ddp u8"] == (5.0 + 2.0) / 2  # 10/2 and 20/10
    assert found[f"1gbit u8 {LIMIT}"] == (2.0 + 5.0) / 2
    assert found["1gbit ddp ddp"] == 1.0


def test_every_target_is_measured_by_a_full_run() -> None:
    measured = {f"{rate} {a} {b}" for rate in LINKS for a in CONTENDERS for b in CONTENDERS}
    assert {target.key for target in TARGETS} <= measured
    assert len({target.key for target in TARGETS}) == 11


def test_the_table_has_both_ratios_and_does_without_them() -> None:
    console = Console(file=StringIO(), width=160)
    console.print(table(result()))
    (row,) = (line for line in console.file.getvalue().splitlines() if " u8 " in line)
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["6.0", "4.0..8.0", "3.50", "3.50"]
    alone = result()
    del alone["contenders"][PEER], alone["contenders"][LIMIT]
    console.print(table(alone))
    assert "│                 - │" in console.file.getvalue()

"""What `tp` and `cp` make of their samples, and groups that send nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks import cp, tp
from benchmarks.targets import judge
from shoal.comm import Group


def result(case: str, ours: float, torch_: float, sequence: float) -> dict:
    rows = {"no-communication": 9.0, "shoal": ours, "torch": torch_, "torch-sequence": sequence}
    contenders = {
        name: {"samples_ms": [[ms, ms, ms + 5], [ms, ms, ms]], "share": 9.0 / ms} for name, ms in rows.items()
    }
    return {"case": case, "precision": "fp32", "contenders": contenders}


def test_ours_is_held_against_the_faster_of_torchs_own():
    figures = tp.figures([result("8x256", 9.5, 12.0, 14.0), result("2x64", 10.0, 15.0, 12.0)])
    assert figures["8x256 fp32 limit"] == pytest.approx(9 / 9.5) and figures["8x256 fp32 torch"] == pytest.approx(
        12 / 9.5
    )
    judged = {each["key"]: each["reached"] for each in judge(tp.TARGETS, figures)}
    assert judged["8x256 fp32 limit"] and judged["8x256 fp32 torch"] and not judged["2x64 fp32 torch"]
    assert judged["8x256 bf16 torch"] is None, "not measured"


def test_alone_a_rank_takes_its_own_for_what_others_would_send():
    group = Group.of(tp.Alone(1, 2))
    mine = torch.arange(3.0)
    assert group.all_gather(torch.empty(6), mine).tolist() == [0, 1, 2, 0, 1, 2]
    assert group.reduce_scatter(torch.empty(2), torch.arange(4.0)).tolist() == [2, 3]
    assert group.all_reduce(mine.clone()).tolist() == [0, 1, 2]


def test_what_ranks_of_shared_rows_keep_and_take():
    rows = {"no-communication": 9.0, "ulysses": 10.0, "ring": 11.0, "gathered": 12.0, "one-process": 20.0}
    kept = {"ulysses": 50, "ring": 60, "gathered": 90, "one-process": 100, "no-communication": 50}
    contenders = {
        name: {"samples_ms": [[ms], [ms]], "share": 9.0 / ms, "kept": kept[name]} for name, ms in rows.items()
    }
    figures = cp.figures([{"case": "1x8192", "precision": "fp32", "contenders": contenders}])
    assert figures == {
        "fp32 ulysses kept": 0.5,
        "fp32 ulysses time": 1.2,
        "fp32 ring kept": 0.6,
        "fp32 ring time": 12 / 11,
    }
    judged = {each["key"]: each["reached"] for each in judge(cp.TARGETS, figures)}
    assert judged["fp32 ulysses kept"] and not judged["fp32 ring kept"] and judged["fp32 ring time"]

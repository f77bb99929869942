"""What `zero` and `host_adam` make of their samples."""

from __future__ import annotations

import pytest
import torch

from benchmarks import host_adam, zero
from benchmarks.targets import judge


def result(stage: int, ours: float, theirs: float, memory: int) -> dict:
    peers = {1: ["deepspeed", "zero-redundancy"], 3: ["deepspeed", "fsdp2"]}[stage]
    rows = {"shoal": ours, "no-communication": 9.0, **dict.fromkeys(peers, theirs)}
    contenders = {
        name: {
            "samples_ms": [[ms, ms, ms + 5], [ms + 1, ms, ms + 1]],
            "share": 9.0 / ms,
            "peak_pss": 100 if name == "shoal" else memory,
        }
        for name, ms in rows.items()
    }
    return {"model": "33m", "precision": "fp32", "stage": stage, "contenders": contenders}


def test_ratios_of_time_and_memory_are_theirs_over_ours():
    figures = zero.figures([result(1, 10.0, 15.0, 150), result(3, 10.0, 12.0, 90)])
    assert figures["33m of the limit"] == 0.9
    assert 1.4 < figures["33m 1 deepspeed time"] < 1.5 and figures["33m 1 zero-redundancy memory"] == 1.5
    judged = {each["key"]: each["reached"] for each in judge(zero.TARGETS, figures)}
    assert (
        judged["33m 1 deepspeed time"]
        and judged["33m 3 fsdp2 time"]
        and not judged["33m 3 fsdp2 memory"]
        and not judged["33m of the limit"]
    )
    assert judged["33m 2 deepspeed time"] is None, "not measured"


@pytest.mark.parametrize("name", ["shoal", "torch fused", "shoal, bf16", "torch fused, bf16", "shoal, split"])
def test_each_contender_of_host_adam_updates(name):
    updates = {
        "shoal": host_adam.shoal(1000, low=False),
        "torch fused": host_adam.torch_fused(1000, low=False),
        "shoal, bf16": host_adam.shoal(1000, low=True),
        "torch fused, bf16": host_adam.torch_fused(1000, low=True),
        "shoal, split": host_adam.shoal(1000, low=True, split=True),
    }
    found = host_adam.measure({name: updates[name]}, 1000, 2)
    assert len(found[name]) == 2 and all(figure > 0 for figure in found[name])


def test_contenders_of_host_adam_compute_the_same():
    """Each after one update of the same gradients and masters."""
    weights = {}
    for name, make in (("shoal", host_adam.shoal), ("torch", host_adam.torch_fused)):
        update = make(4096, low=True)
        update()
        (state,) = (
            cell.cell_contents for cell in update.__closure__ if isinstance(cell.cell_contents, host_adam.State)
        )
        weights[name] = state.weights
    torch.testing.assert_close(weights["shoal"], weights["torch"], rtol=1e-2, atol=1e-5)
    assert host_adam.ratios({name: [2.0, 2.0] for pair in host_adam.PAIRS.values() for name in pair}) == dict.fromkeys(
        host_adam.PAIRS, 1.0
    )

"""The soak: its test of growth sees a leak through noise and changes of nodes, and no growth where there is none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.growth import Sample, growth

MIB = 2**20


def series(leak: float = 0.0, processes: int = 4, seed: int = 0) -> list[Sample]:
    """20 minutes of processes that live one after the other, on one to three nodes, each of which takes 1 MiB; `leak`:
    MiB an hour."""
    draw, samples = random.Random(seed), list[Sample]()
    for number in range(processes):
        base = 300 * MIB + draw.uniform(-20, 20) * MIB
        for second in range(1200 // processes):
            at = number * 1200 / processes + second
            nodes = 1 + int(at // 97) % 3
            value = base + nodes * MIB + leak * MIB * second / 3600 + draw.gauss(0, 0.5) * MIB
            samples.append(Sample((number, nodes), at, value))
    return samples


@pytest.mark.fast
@pytest.mark.parametrize("processes", [1, 4, 20])
@pytest.mark.parametrize("seed", range(3))
def test_a_leak_is_seen_and_noise_is_none(processes, seed):
    steady = growth(series(0, processes, seed), 2 * MIB)
    assert steady.is_none and steady.samples == 1200 and abs(steady.grown) < MIB
    leaks = growth(series(1000, processes, seed), 2 * MIB)
    assert not leaks.is_none and leaks.per_hour / MIB == pytest.approx(1000, rel=0.1)
    assert growth(series(1000, processes, seed), 2 * MIB, share=2.0).is_none, "a share of the mean"


@pytest.mark.fast
def test_a_small_case_by_hand():
    samples = [Sample("a", 0, 1), Sample("a", 10, 2), Sample("b", 100, 50), Sample("b", 110, 51), Sample("c", 5, 900)]
    found = growth(samples, 0.5)
    assert (found.per_hour, found.grown, found.span, found.levels, found.is_none) == (360, 1, 10, 3, False)
    assert growth([Sample("a", 3, 1)], 0.5).is_none and growth([], 0.5).is_none


@pytest.mark.fast
def test_metrics_are_read_as_they_grow(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = soak.Metrics(path)
    metrics.read()
    path.write_text('{"kind": "membership", "lost": 0, "world": 1}\n{"kind": "step", "step": 1}\n{"kind": "st')
    metrics.read()
    assert (metrics.step, metrics.generations) == (1, 1)
    with path.open("a") as file:
        file.write('ep", "step": 2}\n{"kind": "membership", "lost": 3, "world": 2}\n')
    metrics.read()
    assert (metrics.step, metrics.generations, metrics.lost, metrics.worlds) == (2, 2, 3, [1, 2])


@pytest.mark.matrix
@pytest.mark.alone
def test_a_soak_of_half_a_minute(monkeypatch):
    monkeypatch.setattr(soak, "SETTLE", 2.0)
    monkeypatch.setattr(soak, "WARM_UP", 5.0)
    found = soak.run(minutes=0.5, every=6.0, most=2, seed=1)
    assert found["events"] and found["generations"] > len(found["events"]) and found["steps"] > 10
    assert {"rank, memory", "first supervisor, threads", "host, temporary files"} <= found["growth"].keys()
    assert not any(found["left"].values())

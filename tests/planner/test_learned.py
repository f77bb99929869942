"""What is kept of this machine: with its age, of this machine alone, and nothing that is not plausible."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.comm import Reach, Reaches, World
from shoal.device import CPU
from shoal.planner import kept, measure
from shoal.planner.cluster import Link
from shoal.planner.learned import Learned, learn, learned, newest, reaches_of
from tests.pool import run_ranks

HOST = os.uname().nodename


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shoal" / "machine.json"


def age(cache: Path, seconds: float) -> None:
    """Makes all that is kept older."""
    content = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: {**each, "at": each["at"] - seconds} for key, each in content.items()}))


def test_two_that_keep_at_once_lose_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_all, entry = kept._all, {"at": time.time()}
    other = Thread(target=kept.keep, args=("other", entry))

    def another_writes_meanwhile() -> dict[str, Any]:
        found = read_all()
        if other.ident is None:
            other.start()
            other.join(0.2)
        return found

    monkeypatch.setattr(kept, "_all", another_writes_meanwhile)
    kept.keep("own", entry)
    other.join()
    assert kept.read("own") == kept.read("other") == entry
    assert [each.name for each in cache.parent.iterdir()] == [cache.name], "nothing else stays"


@pytest.mark.fast
def test_rates_are_measured_once_a_month_and_say_how_long_that_took(cache: Path, monkeypatch: Any) -> None:
    first = measure.rates(CPU, torch.float32)
    assert 0 < first.took < 60 and first.flops["fp32"] > 1e8 and first.bandwidth > 1e8 and first.to_host > 1e7
    assert set(first.flops) == {"fp32", "bf16"} and first.disk >= 0
    sizes, shares = zip(*first.reached, strict=True)
    assert list(sizes) == sorted(sizes) and list(shares) == sorted(shares) and 0 < shares[0] <= shares[-1] <= 1
    calls: list[object] = []
    monkeypatch.setattr(
        measure, "measure_products", lambda *given, **_: calls.append(given) or [(2.0, 1e-9), (16.0, 4e-9)]
    )
    assert measure.rates(CPU, torch.float32) == first and not calls
    assert measure.rates(CPU, torch.float32, fresh=True) != first and len(calls) == 2
    age(cache, kept.STALE + 1)
    measure.rates(CPU, torch.float32)
    assert len(calls) == 4
    age(cache, -2 * kept.DAY)
    measure.rates(CPU, torch.float32)
    assert len(calls) == 6, "nor what a clock that was ahead has kept"
    monkeypatch.setattr(kept.os, "uname", lambda: type("Names", (), {"nodename": "elsewhere"}))
    measure.rates(CPU, torch.float32)
    assert len(calls) == 8, "another machine's do not count"


@pytest.mark.fast
def test_what_was_learned_is_of_as_many_ranks_and_not_for_ever(cache: Path) -> None:
    one = Learned(2.0, 2.5, 1.5, 0.01, 1e-4, (Reach("all_reduce", 2, 1e-4, 1e9),), (), "run", measure.time.time())
    learn(CPU, torch.float32, 2, 2, [HOST], one)
    assert learned(CPU, torch.float32, 2, 2, [HOST]) == one
    for dtype, ranks, on_host in ((torch.bfloat16, 2, 2), (torch.float32, 4, 4), (torch.float32, 4, 2)):
        assert learned(CPU, dtype, ranks, on_host, [HOST]) is None
    assert learned(CPU, torch.float32, 2, 2, [HOST, "other"]) is None
    age(cache, kept.STALE + 1)
    assert learned(CPU, torch.float32, 2, 2, [HOST]) is None


@pytest.mark.fast
def test_predictions_take_what_was_learned(cache: Path, monkeypatch: Any) -> None:
    now = measure.time.time()
    rates = measure.Rates({"fp32": 1e9}, ((1e6, 0.5), (1e9, 0.8)), 2e9, 1e-6, 2.5, 1e9, 5e8, 2.0, now)
    monkeypatch.setattr(measure, "rates", lambda *_: rates)
    monkeypatch.setattr(kept.os, "cpu_count", lambda: 2)
    old = (Reach("all_reduce", 2, 1e-3, 1e8), Reach("all_gather", 2, 1e-3, 1e8))
    groups = Reaches("shared memory", (HOST,), 2, 2, old, (), 0.7, 1.0, now - 60)
    plain = measure.here(2, 2, torch.float32, CPU, groups)
    assert plain.contention == 0.7 and plain.hosts[0].inside.reached == (old[1], old[0])
    assert plain.hosts[0].disk == 5e8 and "60 s ago" in plain.said[0]
    told = Reach("all_reduce", 2, 5e-4, 2e8)
    learn(CPU, torch.float32, 2, 2, [HOST], Learned(2.0, 3.0, 1.0, 0.25, 0.125, (told,), (), "run", now))
    found = measure.here(2, 2, torch.float32, CPU, groups)
    device = found.hosts[0].device
    assert device.flops == {"fp32": 0.5e9} and (device.backward, device.updating) == (1.5, 0.5)
    assert (device.launch, device.cold) == (2e-6, 2.5) and (found.step, found.data) == (0.25, 0.125)
    assert found.hosts[0].inside.seconds("all_reduce", 2e8, 2) == pytest.approx(1 + 5e-4)
    assert found.hosts[0].inside.seconds("all_gather", 1e8, 2) == pytest.approx(1 + 1e-3)
    assert "learned from run" in found.said[1]
    crowded = measure.here(8, 8, torch.float32).hosts[0].device  # on two cores; of as many ranks nothing was learned
    assert (crowded.flops["fp32"], crowded.launch, crowded.backward) == (0.25e9, 4e-6, 1.0)
    monkeypatch.setattr(measure.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    apart = measure.here(8, 1, torch.float32, sharing=8)  # of one host, but not side by side
    assert apart.memory == 2**27 and apart.hosts[0].device.flops["fp32"] == 0.25e9 and apart.per_host == 1


def row(operation: str, payload: int, seconds: float, across: bool = False, ranks: int = 2) -> dict[str, Any]:
    return {"operation": operation, "what": "copies", "ranks": ranks, "across": across, "payload": payload,
            "calls": 3, "seconds": seconds}  # fmt: skip


@pytest.mark.fast
def test_links_come_from_calls_of_large_tensors() -> None:
    link = Link(1e-4, 1e9)
    steps = [[
        row("all_reduce", 8, 1e-3 + late),
        row("all_reduce", 2**20, 3e-3 + late),
        row("all_gather", 2**20, 2e-3),
        row("send", 64, 1e-4),  # says nothing of a bandwidth
        row("all_to_all", 2**20, 9.0),  # something else was the matter
        row("all_reduce", 2**20, 1.0, across=True, ranks=4),
    ] for late in (0.0, 1e-4, 1.0)]  # fmt: skip
    reduce, gather = sorted(reaches_of(steps, False, link), key=lambda each: each.operation, reverse=True)
    assert (reduce.operation, gather.operation) == ("all_reduce", "all_gather")
    assert reduce.seconds(2**20) == pytest.approx(3.1e-3) and reduce.latency == pytest.approx(1.1e-3, rel=0.01)
    assert gather.seconds(2**20) == pytest.approx(2e-3) and gather.latency == pytest.approx(1e-4)
    (far,) = reaches_of(steps, True, Link(1e-4, 1e7))
    assert far.ranks == 4 and far.seconds(2**20) == pytest.approx(1.0)
    assert newest([*(reduce, gather), Reach("all_gather", 2, 1.0, 1.0)])[0] == Reach("all_gather", 2, 1.0, 1.0)


def groups(world: World, cache: str) -> tuple[Reaches | None, Reaches | None, Reaches | None]:
    os.environ["XDG_CACHE_HOME"] = cache
    return (
        measure.groups_of(world),
        measure.groups_of(world),
        measure.known_groups(world.device, world.size, world.on_host, [world.host]),
    )


def test_groups_are_measured_once_and_known_to_who_asks(cache: Path) -> None:
    told = run_ranks(groups, 4, str(cache.parents[1]))
    first, second, third = told[0]
    assert first == second == third and all(each == told[0] for each in told), "all ranks have the same"
    assert first is not None and not first.across and 0 <= first.contention < 20 and first.took < 60
    operations = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "exchange", "send"}
    assert {(each.operation, each.ranks) for each in first.inside} == {(name, n) for name in operations for n in (2, 4)}
    assert all(each.latency > 0 and each.bandwidth > 0 for each in first.inside)
    assert "an all-reduce of 4 ranks over shared memory" in str(first)

"""How the peak is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import memory, predicted

pytestmark = [pytest.mark.alone, pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")]
MIB = 2**20


def peak_of_a_block() -> int:
    """Bytes by which a block that is gone again has raised the peak of a fresh process, beyond what was free below
    it."""
    status = memory._kib(Path("/proc/self/status"))
    headroom = 1024 * (status["VmHWM"] - status["VmRSS"])
    before = memory.peak_pss()
    block = torch.ones(headroom + 64 * MIB, dtype=torch.uint8)
    del block
    return memory.peak_pss() - before


def peaks_before_and_after() -> tuple[int, int]:
    """Bytes of the peak while a block was there, and of that which begins after it is gone."""
    predicted._running.append(SimpleNamespace(parts=SimpleNamespace(link=None)))  # type: ignore[arg-type]
    block = torch.ones(256 * MIB, dtype=torch.uint8)
    before = memory.peak_pss()
    del block
    predicted.begin_anew()
    return before, memory.peak_pss()


@pytest.fixture(scope="module")
def told() -> list[int]:
    """What a fresh process says of its peaks."""
    functions = "peak_of_a_block, peaks_before_and_after"
    code = f"from tests.benchmarks.test_memory import {functions}; print(peak_of_a_block(), *peaks_before_and_after())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [int(each) for each in done.stdout.split()]


@pytest.mark.fast
def test_a_peak_outlives_the_memory_that_made_it(told: list[int]) -> None:
    assert told[0] == pytest.approx(64 * MIB, abs=8 * MIB)


@pytest.mark.fast
def test_a_peak_begins_anew(told: list[int]) -> None:
    _, before, after = told
    assert before - after == pytest.approx(256 * MIB, abs=16 * MIB)


@pytest.mark.fast
def test_lines_of_proc_in_kib(tmp_path: Path) -> None:
    file = tmp_path / "status"
    file.write_text("Name:\tpython\nVmHWM:\t  1200 kB\nThreads:\t3\nPss:  7 kB\n")
    assert memory._kib(file) == {"VmHWM": 1200, "Pss": 7}

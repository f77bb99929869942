"""How the peak is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import memory

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


@pytest.mark.fast
def test_a_peak_outlives_the_memory_that_made_it() -> None:
    code = "from tests.benchmarks.test_memory import peak_of_a_block; print(peak_of_a_block())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(64 * MIB, abs=8 * MIB)


@pytest.mark.fast
def test_lines_of_proc_in_kib(tmp_path: Path) -> None:
    file = tmp_path / "status"
    file.write_text("Name:\tpython\nVmHWM:\t  1200 kB\nThreads:\t3\nPss:  7 kB\n")
    assert memory._kib(file) == {"VmHWM": 1200, "Pss": 7}

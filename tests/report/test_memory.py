from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from shoal.report import memory
from shoal.report.memory import MemoryMeter, MemoryUse, read_memory

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")
BLOCK = 64 * 2**20


def test_a_block_of_memory_is_seen_while_it_is_there_and_in_the_peak_afterwards() -> None:
    meter = MemoryMeter(CPU, interval=0)
    before = meter.read()
    block = mmap.mmap(-1, BLOCK)  # not from the C heap, which an engine in this process would keep
    block.write(b"1" * BLOCK)
    during = meter.read()
    block.close()
    after = meter.read()
    assert during.bytes - before.bytes > 0.9 * BLOCK
    assert during.bytes - after.bytes > 0.9 * BLOCK
    assert meter.peak.rss >= during.rss
    assert meter.peak.bytes == during.bytes


def test_the_meter_does_not_read_again_within_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = MemoryMeter(CPU, interval=3600)
    first = meter.read()
    monkeypatch.setattr(memory, "read_memory", lambda device: pytest.fail("read again"))
    assert meter.read() == first and first.rss > 0


def test_the_kernels_rollup_is_read_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollup = tmp_path / "smaps_rollup"
    rollup.write_text(
        "55850cc66000-7ffc8ba5c000 ---p 00000000 00:00 0    [rollup]\nRss:      2000 kB\nPss:      1500 kB\n"
    )
    monkeypatch.setattr(memory, "ROLLUP", rollup)
    assert read_memory(CPU) == MemoryUse(rss=2000 * 1024, pss=1500 * 1024, device=None)


def test_without_the_kernels_files_there_is_rss_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ROLLUP", tmp_path / "absent")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "absent")
    use = read_memory(CPU)
    assert use.pss is None
    assert use.bytes == use.rss > 2**20
    assert MemoryMeter(CPU).peak.rss > 2**20


@pytest.mark.parametrize(
    "use, figure",
    [
        (MemoryUse(rss=3, pss=None, device=None), 3),
        (MemoryUse(rss=3, pss=2, device=None), 2),
        (MemoryUse(rss=3, pss=2, device=0), 0),
    ],
)
def test_the_one_figure_is_the_most_telling_one(use: MemoryUse, figure: int) -> None:
    assert use.bytes == figure

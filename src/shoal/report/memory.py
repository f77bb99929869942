"""The memory that this process and its GPU use."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from shoal.device import most_allocated

ROLLUP = Path("/proc/self/smaps_rollup")
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MemoryUse:
    """Memory use in bytes.

    rss: counts shared pages in full.
    pss: divides shared pages among the processes that map them; None where the system does not tell.
    device: the most that the accelerator's allocator has given; None on a CPU.
    """

    rss: int
    pss: int | None
    device: int | None

    @property
    def bytes(self) -> int:
        """The figure to report: the GPU's, else PSS (so that ranks of one host add up), else RSS."""
        return next(value for value in (self.device, self.pss, self.rss) if value is not None)


def read_memory(device: torch.device) -> MemoryUse:
    """Reads the use at this moment, and the GPU's peak so far. Reading PSS takes about 10 ms per gigabyte."""
    allocated = most_allocated(device)
    if ROLLUP.exists():
        kilobytes = _kilobytes(ROLLUP)
        return MemoryUse(rss=kilobytes["Rss"] * 1024, pss=kilobytes["Pss"] * 1024, device=allocated)
    return MemoryUse(rss=psutil.Process().memory_info().rss, pss=None, device=allocated)


class MemoryMeter:
    """Memory use for a caller that asks at every step: reads at most once in `interval` seconds, the first time
    when it is asked, and keeps the peak."""

    def __init__(self, device: torch.device, interval: float = 1.0) -> None:
        self._device = device
        self._interval = interval
        self._read_at = 0.0
        self._use: MemoryUse | None = None
        self._peak: MemoryUse | None = None

    def read(self) -> MemoryUse:
        if self._use is None or time.monotonic() - self._read_at >= self._interval:
            self._use = read_memory(self._device)
            self._read_at = time.monotonic()
            self._peak = self._use if self._peak is None else _maximum(self._peak, self._use)
        return self._use

    @property
    def peak(self) -> MemoryUse:
        """The highest values seen; `rss` is the kernel's high-water mark where there is one, so it misses no spike."""
        peak = self._peak or self.read()
        if STATUS.exists() and (high_water := _kilobytes(STATUS).get("VmHWM")):
            # The kernel batches its counters, so its mark can lag some pages behind.
            return replace(peak, rss=max(high_water * 1024, peak.rss))
        return peak


def _kilobytes(path: Path) -> dict[str, int]:
    """Parses the "Name:   123 kB" lines of a file under /proc."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) == 3 and row[2] == "kB"}


def _maximum(a: MemoryUse, b: MemoryUse) -> MemoryUse:
    def larger(x: int | None, y: int | None) -> int | None:
        return y if x is None else x if y is None else max(x, y)

    return MemoryUse(rss=max(a.rss, b.rss), pss=larger(a.pss, b.pss), device=larger(a.device, b.device))

"""How long work on a device takes, from when it is idle until it is idle again."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shoal.device.streams import synchronize


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of one run of `work`."""
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def quickest(device: torch.device, times: int, work: Callable[[], object]) -> float:
    """Seconds of the shortest of several runs of `work`."""
    return min(seconds_of(device, work) for _ in range(times))

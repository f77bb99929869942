"""What a device reaches at best, measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from shoal.device.backend import is_accelerator
from shoal.device.memory import forget_most_allocated
from shoal.device.streams import synchronize

PEAK_SECONDS = 0.3
CPU_SIZE, ACCELERATOR_SIZE = 1024, 8192
"""Rows and columns of the matrices that are multiplied: large enough for the best rate."""


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The FLOP/s of the best of a few square matrix products in `dtype`, in about 0.3 s, with the current number of
    threads.

    Ranks that share a host share its cores and memory: all of them measure at the same time, and the sum is the peak of
    the run.
    """
    size = ACCELERATOR_SIZE if is_accelerator(device) else CPU_SIZE
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best, began = math.inf, time.perf_counter()
    runs = 0
    # The first product pays for the choice of a kernel and for page faults, so there is always a second one.
    while runs < 2 or time.perf_counter() - began < PEAK_SECONDS:
        best = min(best, _seconds_of(lambda: torch.mm(a, b), device))
        runs += 1
    forget_most_allocated(device)  # these matrices are no part of the run's peak
    return 2 * size**3 / best


def _seconds_of(operation: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    operation()
    synchronize(device)
    return time.perf_counter() - began

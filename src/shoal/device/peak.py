"""What a device reaches at best, measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from shoal.device.backend import is_accelerator
from shoal.device.memory import forget_most_allocated
from shoal.device.timing import seconds_of

PEAK_SECONDS = 0.3
CPU_SIZE, ACCELERATOR_SIZE = 1024, 8192
"""Rows and columns of the largest matrices that are multiplied: large enough for the best rate."""


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The FLOP/s of the best of a few square matrix products in `dtype`, in about 0.3 s, with the current number of
    threads.

    Ranks that share a host share its cores and memory: all of them measure at the same time, and the sum is the peak of
    the run.
    """
    size, largest = CPU_SIZE, ACCELERATOR_SIZE if is_accelerator(device) else CPU_SIZE
    product, best, runs = _product(size, device, dtype), 0.0, 0
    began = time.perf_counter()
    while runs < 2 or time.perf_counter() - began < PEAK_SECONDS:
        if runs >= 2 and size < largest:
            size *= 2
            product = _product(size, device, dtype)
        best = max(best, 2 * size**3 / seconds_of(device, product))
        runs += 1
    del product
    forget_most_allocated(device)  # these matrices are no part of the run's peak
    return best


def _product(size: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Makes the product of two random matrices; the first one, which pays for the choice of a kernel and for page
    faults, is done."""
    product = partial(torch.mm, *(torch.randn(size, size, device=device).to(dtype) for _ in range(2)))
    seconds_of(device, product)
    return product

"""What the products of a linear layer reach, by their size: forward and both products of backward, with matrices that
are transposed as they are there."""

from __future__ import annotations

import torch

from shoal.device.backend import is_accelerator
from shoal.device.memory import forget_most_allocated
from shoal.device.timing import seconds_of

WIDTHS, ACCELERATOR_WIDTHS = (64, 128, 256, 512, 1024), (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the matrices, which are square."""
ENOUGH, REPEATS = 0.02, 5
"""Seconds, and number, of trials of one width after which no more are made. After one of five times these seconds no
larger width is tried."""


def measure_products(device: torch.device, dtype: torch.dtype, largest: bool = True) -> list[tuple[float, float]]:
    """Operations of one product, and seconds of one, by width, ascending; with the current number of threads, in a
    few tenths of a second, and without the `largest` width in less. Raises RuntimeError for a format that the device
    has no products of."""
    rows = []
    widths = ACCELERATOR_WIDTHS if is_accelerator(device) else WIDTHS
    for width in widths if largest else widths[:-1]:
        x, weight, gradient = (torch.randn(width, width, device=device).to(dtype) for _ in range(3))
        _timed(x, weight, gradient)  # chooses kernels
        taken = [_timed(x, weight, gradient)]
        while len(taken) < 2 or (len(taken) < REPEATS and sum(taken) < ENOUGH):
            taken.append(_timed(x, weight, gradient))
        rows.append((2.0 * width**3, min(taken) / 3))
        del x, weight, gradient
        if taken[0] > 5 * ENOUGH:
            break
    forget_most_allocated(device)  # these matrices are no part of a run's peak
    return rows


def _timed(x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> float:
    def work() -> None:
        torch.mm(x, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    return seconds_of(x.device, work)

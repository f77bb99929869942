"""Exact sums of numbers that are not negative: the same bits in whatever order and grouping they are added, so they do
not depend on which parameters share a chunk, or on which rank added what.

A sum is a row of digits of 32 bits, each a whole number in fp64: digit d counts multiples of 2^(32 d + LOWEST). Rows
add up elementwise, without rounding for up to two million numbers; only `value_of` rounds. Values below 2^LOWEST are
left out. (Demmel, Nguyen: Parallel reproducible summation, 2015, is the general case.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._guards import active_fake_mode

BITS, LOWEST, DIGITS = 32, -640, 52


def exact_sum(values: Tensor) -> Tensor:
    """Sums `values` (1-D, fp64, none below 0) into a row of DIGITS, with NaN in it if one of them is not finite."""
    finite = values.isfinite()
    rest = torch.where(finite, values, 0.0)
    digit = (torch.frexp(rest).exponent.long() - 1 - LOWEST).div(BITS, rounding_mode="floor").clamp(0, DIGITS - 1)
    weights = weights_of(values.device)
    row = values.new_zeros(DIGITS)
    for _ in range(3):  # 53 bits lie in at most three digits
        unit = weights[digit]
        part = (rest / unit).floor()
        row.index_add_(0, digit, part)
        rest, digit = rest - part * unit, (digit - 1).clamp(min=0)
    return row + torch.where(finite.all(), 0.0, torch.nan)


def value_of(row: Tensor) -> Tensor:
    """Rounds the sum that `row` stands for to fp64 (0-dim)."""
    return (row * weights_of(row.device)).sum()


def weights_of(device: torch.device) -> Tensor:
    """What a digit of each place counts; made once, and once more for each mode whose tensors are fake. Who counts the
    memory of a step asks for it before."""
    fakes = active_fake_mode()
    known = _made if fakes is None else vars(fakes).setdefault("_shoal_weights_of_digits", {})
    if device not in known:
        counts = [2.0 ** (BITS * digit + LOWEST) for digit in range(DIGITS)]
        known[device] = torch.tensor(counts, dtype=torch.float64, device=device)
    weights: Tensor = known[device]
    return weights


_made: dict[torch.device, Tensor] = {}

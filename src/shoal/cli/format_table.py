"""The number formats as a table: their ranges, and the rate of matrix products in them on this machine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from rich.table import Table

from shoal import units
from shoal.device import measure_peak_flops, tf32
from shoal.precision.formats import FORMATS, multiplies

BAR = 12
"""Width of the longest bar in characters."""


def measure_formats(device: torch.device) -> dict[str, float]:
    """Measures the FLOP/s of matrix products on `device`, for each format that torch.mm supports there."""
    peaks = {}
    for kind in FORMATS:
        if kind.stored.itemsize == 1 or not multiplies(kind, device):
            continue
        with tf32(kind.name == "tf32"):
            peaks[kind.name] = measure_peak_flops(device, kind.stored)
    return peaks


def format_table(peaks: Mapping[str, float], device: torch.device) -> Table:
    """Makes a table with one row per format (bits of sign, exponent and mantissa); bars are proportional to rates."""
    table = Table(
        title=f"number formats, and matrix products on {device.type}", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("format", no_wrap=True)
    for heading in ("bits", "largest", "smallest", "epsilon", "matrix products"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.columns[-1].justify = "left"
    most = max(peaks.values(), default=1.0)
    for kind in FORMATS:
        peak = peaks.get(kind.name)
        rate = f"{units.flops_rate(peak):>14} {'█' * max(1, round(peak / most * BAR))}" if peak else "-"
        if peak is None and multiplies(kind, device):
            rate = "has them"
        numbers = (f"{value:.2g}" for value in (kind.largest, kind.smallest, kind.epsilon))
        table.add_row(kind.name, f"1+{kind.exponent_bits}+{kind.mantissa_bits}", *numbers, rate)
    return table

"""Formats quantities for people."""

from __future__ import annotations

import math

_BYTES = (" B", " KiB", " MiB", " GiB", " TiB", " PiB")


def count(value: float) -> str:
    """Formats a number with three significant digits and a decimal prefix: 950, 12.3k, 4.56M."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P"))


def size(num_bytes: float) -> str:
    """Formats bytes with three significant digits and a binary unit: 512 B, 1.20 GiB."""
    return _scaled(num_bytes, 1024, _BYTES)


def enough(num_bytes: float) -> str:
    """Formats bytes as `size`, rounded up: a reader who gives as much has given enough."""
    return _scaled(num_bytes, 1024, _BYTES, up=True)


def flops_rate(flops_per_second: float) -> str:
    """Formats FLOP/s with a decimal prefix: 190 GFLOP/s, 1.25 TFLOP/s."""
    return _scaled(flops_per_second, 1000, tuple(f" {prefix}FLOP/s" for prefix in ("", "k", "M", "G", "T", "P")))


def duration(seconds: float) -> str:
    """Formats seconds by their two largest units: 850 ms, 4.2 s, 2 min 05 s, 3 h 20 min, 2 d 04 h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    days, hours_of_day = divmod(hours, 24)
    if days:
        return f"{days} d {hours_of_day:02d} h"
    if hours:
        return f"{hours} h {minutes_of_hour:02d} min"
    return f"{minutes} min {whole_seconds:02d} s"


def _scaled(value: float, base: int, units: tuple[str, ...], up: bool = False) -> str:
    if not math.isfinite(value):
        return str(value)
    power = 0
    # A value that would be printed as 1000 of one unit is 1 of the next.
    while abs(value) >= 999.5 and power < len(units) - 1:
        value /= base
        power += 1
    if power == 0:
        value = math.ceil(value) if up else value
        return f"{value:.3g}{units[0]}" if value != int(value) else f"{int(value)}{units[0]}"
    digits = max(0, 3 - len(str(int(abs(value))))) if abs(value) >= 1 else 2
    if up:
        value = math.ceil(value * 10**digits) / 10**digits
    return f"{value:.{digits}f}{units[power]}"

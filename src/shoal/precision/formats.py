"""Floating formats: their range and precision, and which of them a device multiplies matrices in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.device import compute_capability


@dataclass(frozen=True)
class Format:
    """A binary floating format.

    - `stored`: the dtype in memory; tf32 is how products of fp32 factors are rounded
    - `largest`, `smallest`: its range; `smallest` is the smallest normal number
    - `epsilon`: the step above 1
    """

    name: str
    stored: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    largest: float
    smallest: float
    epsilon: float

    @property
    def bits(self) -> int:
        """Bits of sign, exponent and mantissa together."""
        return 1 + self.exponent_bits + self.mantissa_bits


def _format(name: str, dtype: torch.dtype, exponent_bits: int, mantissa_bits: int) -> Format:
    info = torch.finfo(dtype)
    return Format(name, dtype, exponent_bits, mantissa_bits, info.max, info.smallest_normal, info.eps)


FORMATS = (
    _format("fp64", torch.float64, 11, 52),
    _format("fp32", torch.float32, 8, 23),
    Format("tf32", torch.float32, 8, 10, (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-10),
    _format("bf16", torch.bfloat16, 8, 7),
    _format("fp16", torch.float16, 5, 10),
    _format("fp8 e4m3", torch.float8_e4m3fn, 4, 3),
    _format("fp8 e5m2", torch.float8_e5m2, 5, 2),
)
"""All formats, widest first."""


def multiplies(kind: Format, device: torch.device) -> bool:
    """Returns whether `device` has matrix products in that format; a CPU emulates none of those it lacks."""
    if kind.name in ("fp64", "fp32", "bf16", "fp16"):
        return True
    capability = compute_capability(device)
    return capability is not None and capability >= ((8, 0) if kind.name == "tf32" else (8, 9))

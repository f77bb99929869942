"""Settings of the C heap of a training process: freed memory is kept for the next step.

Each step allocates the same activations and gradients. By default glibc maps large blocks freshly and returns the top
of the heap whenever it is free, so the kernel zeroes hundreds of MiB of pages a step: for a GPT of 33.7M parameters on
one core that took a seventh of the step in bf16, with the same peak of memory (docs/design.md).

The largest blocks are still mapped. Without that limit, smaller blocks would take up the holes that they leave, and the
heap would grow: by a quarter of a rank's memory for a GPT of 124M, whose logits take 200 MiB.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1
LARGE = 2**25
"""Bytes from which a block is mapped: the most that glibc allows."""


def keep_freed_memory() -> bool:
    """Sets these options for this process, for good; returns False where the C library has none (it is not glibc)."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_THRESHOLD, LARGE))

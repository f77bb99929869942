"""Memory of a training process: its C heap keeps what is freed for the next step, and large tensors lie in large pages.

Each step allocates the same activations and gradients. By default glibc maps large blocks freshly and returns the top
of the heap whenever it is free, so the kernel zeroes hundreds of MiB of pages a step: for a GPT of 33.7M parameters on
one core that took a seventh of the step in bf16, with the same peak of memory (docs/design.md).

The largest blocks are still mapped. Without that limit, smaller blocks would take up the holes that they leave, and the
heap would grow: by a quarter of a rank's memory for a GPT of 124M, whose logits take 200 MiB.
"""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

from shoal.native import pretends

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1
LARGE = 2**25
"""Bytes from which a block is mapped: the most that glibc allows."""


_MADV_HUGEPAGE = 14  # mman.h
_LARGE_PAGE = 2**21
"""Bytes of a page of the next size above 4 KiB; where it is another, advice for part of one does nothing."""


def in_large_pages(fresh: Tensor) -> Tensor:
    """Returns `fresh`, a tensor that nobody has written yet, and asks the kernel for large pages of memory for it.

    A CPU writes 64 MiB of it for the first time in 8 ms then, and in 35 ms in pages of 4 KiB, each of which the kernel
    gives by itself. Where there are none, it lies in small ones; no other memory is taken.
    """
    if sys.platform == "linux" and fresh.is_cpu and fresh.nbytes >= _LARGE_PAGE and not pretends():
        start = -(-fresh.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
        stop = (fresh.data_ptr() + fresh.nbytes) // _LARGE_PAGE * _LARGE_PAGE
        if start < stop:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)
    return fresh


def keep_freed_memory() -> bool:
    """Sets these options for this process, for good; returns False where the C library has none (it is not glibc)."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_THRESHOLD, LARGE))

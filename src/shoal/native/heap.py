"""Memory of a training process: what is freed stays for the next step, and large tensors lie in large pages.

Each step allocates the same activations and gradients. By default glibc maps large blocks freshly and returns the top
of the heap whenever it is free, so the kernel zeroes hundreds of MiB of pages a step: for a GPT of 33.7M parameters on
one core that took a seventh of the step in bf16, with the same peak of memory (docs/design.md).

So torch has its tensors from a range of addresses of their own (`tensors.cpp`), and the C heap, which is left with the
rest, keeps what is freed. Where that cannot be compiled the heap has the tensors too. Its largest blocks are mapped:
without that limit, smaller blocks would take up the holes that they leave, and the heap would grow, by a quarter of a
rank's memory for a GPT of 124M, whose logits take 200 MiB.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shoal.native import compiled, pretends

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1
LARGE = 2**25
"""Bytes from which the C heap maps a block: the most that glibc allows."""
_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared")


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
    """Has this process keep memory that is freed, for good, but for what lies free now; returns False where the C
    library has no such options (it is not glibc)."""
    give_back_memory()
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    kept = mallopt is not None and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_M_MMAP_THRESHOLD, LARGE))
    if (tensors := _tensors()) is not None:
        tensors.shoal_tensors_apart()
    return kept


def give_back_memory() -> None:
    """Gives the memory of tensors that lies free back to the system: of a plan or a model that is gone, or of an
    engine's beginning."""
    if _tensors.cache_info().currsize and (tensors := _tensors()) is not None:
        tensors.shoal_tensors_give_back()


@cache
def _tensors() -> ctypes.CDLL | None:
    """The allocator of tensors, compiled on first use; None where it cannot be had."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if sys.platform != "linux" or os.environ.get("SHOAL_NATIVE") == "0" or compiler is None:
        return None
    home, source = Path(torch.__file__).parent, Path(__file__).with_name("tensors.cpp")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}"
    command = [compiler, *_FLAGS, abi, f"-I{home / 'include'}", f"-L{home / 'lib'}", "-Wl,--no-as-needed", "-lc10"]
    try:
        return compiled("tensors", command, [source], [source], torch.__version__)
    except (OSError, RuntimeError) as error:  # no usable folder for the cache, no headers, or others than it expects
        log.info("tensors lie in the C heap: %s", error)
        return None

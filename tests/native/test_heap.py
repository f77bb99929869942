"""Freed memory is kept, but for the largest blocks: later steps cost few page faults. Large memory has large pages."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.native.heap import in_large_pages

CODE = """
import resource, sys, torch
from shoal.native.heap import LARGE, keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
sizes = (1, 3, 7, 2, 5, 7, 1, 4) * 4 if sys.argv[2] == "steps" else (3 * LARGE // 2**22,)
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**20 * size) for size in sizes]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(sum([step() for _ in range(9)][1:]))
"""
PAGES = 2**20 // mmap.PAGESIZE
"""Pages in a MiB."""


def faults(how: str, what: str) -> int:
    """Page faults of eight steps, after one to warm up: each takes 480 MiB in blocks up to 28 MiB, or one block of 96
    MiB."""
    done = subprocess.run([sys.executable, "-c", CODE, how, what], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_later_steps_fault_in_few_pages():
    """All eight together not a quarter of what one step takes; glibc as it stands faults in the second step anew, and
    some of the others."""
    assert faults("kept", "steps") < 480 * PAGES / 4
    assert faults("given back", "steps") > 0.9 * 480 * PAGES


def test_the_largest_blocks_leave_no_hole():
    """They come fresh each time."""
    assert faults("kept", "large") > 0.9 * 8 * 96 * PAGES


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no large pages")
def test_the_kernel_is_asked_for_large_pages():
    tensor = in_large_pages(torch.empty(2**24))
    middle, flags, inside = tensor.data_ptr() + tensor.nbytes // 2, list[str](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            start, stop = (int(each, 16) for each in first.split("-"))
            inside = start <= middle < stop
        elif inside and first == "VmFlags:":
            flags = rest
    assert "hg" in flags
    small = torch.arange(5)
    assert in_large_pages(small) is small and small.tolist() == [0, 1, 2, 3, 4]

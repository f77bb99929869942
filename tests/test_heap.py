"""Freed memory is kept: later steps cost few page faults."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, sys, torch
from shoal.heap import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**20 * size) for size in (1, 3, 9, 2, 5, 9, 1, 4)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(sum([step() for _ in range(9)][3:]))
"""


def faults(how: str) -> int:
    """Page faults of six steps that each allocate 136 MiB, after three to warm up."""
    done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_later_steps_fault_in_few_pages():
    assert faults("kept") < faults("given back")

"""What all tests share: one thread, few and repeatable examples, and a session that leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.leftovers import SharedMemory, end_processes
from tests.pool import close_pools

os.environ.setdefault("SHOAL_SECRET", "that of the tests")  # before ranks start; else they would make one in the home directory
hypothesis.settings.register_profile("shoal", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("shoal")


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Ends the standing ranks, then fails the session if one of its processes or shared memory files is still there."""
    torch.set_num_threads(1)
    shared_memory = SharedMemory()
    yield
    close_pools()
    left = end_processes() + shared_memory.left()
    assert not left, "the tests left behind:\n" + "\n".join(left)

"""The order in which a module calls its children, read from its source."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from shoal.pipeline.order import children_as_called


@pytest.fixture
def threads_that_take_turns() -> Iterator[None]:
    """Another thread goes on wherever Python collects garbage, which it does all the time."""

    def turn(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    interval, often = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(turn)
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    yield
    gc.callbacks.remove(turn)
    gc.set_threshold(*often)
    sys.setswitchinterval(interval)


def test_ranks_that_are_threads_read_a_model_at_once(threads_that_take_turns):
    layer = nn.TransformerEncoderLayer(8, 2)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: [children_as_called(layer) for _ in range(10)], range(4)))
    assert [name for name, _ in found[0][0]][:2] == ["self_attn", "norm1"]
    assert all(each == found[0][0] for one in found for each in one)

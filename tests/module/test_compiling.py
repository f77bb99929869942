"""What is compiled runs as it is written while somebody observes its operations."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor

from shoal.module.compiling import as_written

pytestmark = pytest.mark.fast


def refused(x: Tensor) -> Tensor:
    print("what a compiler cannot trace")
    return x + 1


def test_observers_that_leave_in_another_order_than_they_came_leave_nothing_behind():
    """Of ranks on threads the second to leave kept all of the process from being compiled from then on."""
    compiled = torch.compile(refused, backend="eager", fullgraph=True)
    first, second = ExitStack(), ExitStack()
    for one in (first, second):
        one.enter_context(as_written())
    first.close()
    assert compiled(torch.ones(1)) == 2, "the second is still there"
    second.close()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(torch.ones(1))

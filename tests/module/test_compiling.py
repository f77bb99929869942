"""What is compiled gives the gradients of what is written, and runs as it is written while somebody observes it."""

from __future__ import annotations

import copy
from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

from shoal.module.compiling import as_written, compile_blocks

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


class Changing(nn.Module):
    """A layer that scales its outputs by what it changes: in place, through a view, into `out=`, under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.ones((), dtype=torch.int64))
        for name in ("mean", "size", "sum", "late"):
            self.register_buffer(name, torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        before = 1 / self.late
        self.calls += 1
        self.size.view(2, 2)[0].mul_(1.5)
        torch.add(self.sum, 1, out=self.sum)
        with torch.no_grad():
            self.mean.lerp_(x.abs().mean(0), 0.5)
            self.late.add_(1)
        return self.norm(self.layer(x)) / self.mean * self.size.view(4) / self.sum * before * self.calls


def test_gradients_are_of_what_was_read_and_not_of_what_a_block_has_changed_since():
    """Torch computes such values again in backward, from what the forward has left in the buffer."""
    written = nn.Sequential(Changing(), Changing())
    compiled = copy.deepcopy(written)
    compile_blocks(compiled, "aot_eager")
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        for each in (written, compiled):
            each.zero_grad()
            each(x).square().sum().backward()
        for mine, plain in zip(compiled.parameters(), written.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, plain.grad)
        for mine, plain in zip(compiled.buffers(), written.buffers(), strict=True):
            torch.testing.assert_close(mine, plain)

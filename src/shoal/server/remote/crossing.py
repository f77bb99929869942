"""Tensors on an accelerator that need a gradient, on their way through a remote module.

Torch runs the backward of what is on a device in one thread of that device, for all threads of the process. One that
waits there for an owner would hold up whatever that owner, or its other clients, ask of this process meanwhile. So
graphs go through stand-ins on the CPU, which have shapes and no memory, and the tensors and gradients beside them:

    x -> _Depart -> stand-in -> the remote module -> stand-in -> _Arrive -> y
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.device import current_stream, record_event


class Crossing:
    """What of one forward is beside its graph: arguments or results by their number; gradients of results, each with
    the event behind which it is there; gradients of arguments."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.grads: dict[int, tuple[Tensor, Any]] = {}
        self.back: dict[int, Tensor] = {}

    def depart(self, number: int, tensor: Tensor) -> Tensor:
        """Returns the stand-in of an argument, through which its gradient comes."""
        made: Tensor = _Depart.apply(self, number, tensor)
        return made

    def arrive(self, number: int, stand_in: Tensor) -> Tensor:
        """Returns the result of which `stand_in` stands in the graph."""
        made: Tensor = _Arrive.apply(self, number, stand_in)
        return made

    def given(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of results, given those of the graph, to be sent. The current stream waits for them;
        who sends waits until they have gone, so nothing else keeps their memory."""
        found = list(grads)
        for number, grad in enumerate(grads):
            if grad is not None and number in self.grads:
                own, event = self.grads.pop(number)
                stream = current_stream(own.device)
                if stream is not None:
                    stream.wait_event(event)
                found[number] = own
        return found

    def returned(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns what stands in the graph for the gradients of arguments."""
        for number, grad in enumerate(grads):
            if grad is not None and not grad.is_cpu:
                self.back[number] = grad
        return [None if grad is None else grad if grad.is_cpu else stand_in_of(grad) for grad in grads]


def stand_in_of(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU of this shape, of one number."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crossing: Crossing, number: int, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.number = crossing, number
        crossing.tensors[number] = tensor.detach()
        return stand_in_of(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, Tensor | None]:
        return None, None, ctx.crossing.back.pop(ctx.number, None)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crossing: Crossing, number: int, stand_in: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.number = crossing, number
        return crossing.tensors.pop(number)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, Tensor | None]:
        (grad,) = grads
        if grad is None:
            return None, None, None
        ctx.crossing.grads[ctx.number] = grad, record_event(grad.device)
        return None, None, stand_in_of(grad)

"""Flat storage for parameters that lie in tensors of their own."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn

from shoal.chunks import Buffer, ChunkKey, ChunkSpec, assign
from shoal.chunks.allocate import Private
from shoal.chunks.spec import extent


def flatten(parameters: Mapping[str, nn.Parameter], member: Mapping[str, int]) -> list[Buffer]:
    """Moves `parameters` into new flat buffers, one for each dtype, device and group (`member[name]`)."""
    order = [(name, p.shape, ChunkKey(p.dtype, str(p.device), member[name], True)) for name, p in parameters.items()]
    buffers = []
    for index, (key, slots) in enumerate(assign(order, sys.maxsize, max(p.itemsize for p in parameters.values()))):
        size, dtype, allocate = extent(slots), key.dtype, Private(torch.device(key.group))
        spec = ChunkSpec(index, slots, size, dtype, dtype, dtype)
        buffer = Buffer(spec, slots, allocate(size, dtype), allocate(size, dtype))
        for slot in slots:
            parameter = parameters[slot.name]
            parameter.data = slot.view(buffer.data).copy_(parameter.detach())
        buffers.append(buffer)
    return buffers

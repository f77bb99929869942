"""Storage of its own for parameters that have none yet."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn

from shoal.chunks import Chunk, ChunkKey, assign
from shoal.chunks.allocate import Private


def flatten(parameters: Mapping[str, nn.Parameter], member: Mapping[str, int]) -> list[Chunk]:
    """Moves `parameters` into new chunks, one for each dtype, device and group (`member[name]`)."""
    order = [(name, p.shape, ChunkKey(p.dtype, str(p.device), member[name], True)) for name, p in parameters.items()]
    chunks = [
        Chunk(index, slots, key.dtype, key.dtype, key.dtype, True, Private(torch.device(key.group)))
        for index, (key, slots) in enumerate(assign(order, sys.maxsize, max(p.itemsize for p in parameters.values())))
    ]
    for chunk in chunks:
        for slot in chunk.slots:
            parameter = parameters[slot.name]
            parameter.data = slot.view(chunk.master).copy_(parameter.detach())
    return chunks

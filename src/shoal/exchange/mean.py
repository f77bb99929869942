"""Replicas that have drifted apart, seen as one: their mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.chunks import Chunk
from shoal.comm import Group
from shoal.optim.optimizer import ChunkOptimizer


@contextmanager
def mean_of_replicas(module: nn.Module, chunks: Sequence[Chunk], group: Group) -> Iterator[None]:
    """Inside, masters, weights and floating buffers of `module` are the mean over `group`, counters the largest; after it, this
    replica's own again. Takes a copy of the masters for that time."""
    buffers = [buffer for buffer in module.buffers() if not buffer.is_complex()]
    own = [tensor.clone() for tensor in _ours(chunks, buffers)]
    try:
        with torch.no_grad():
            for tensor in _ours(chunks, buffers):
                _average(tensor, group)
            _publish(chunks)
        yield
    finally:
        with torch.no_grad():
            for tensor, before in zip(_ours(chunks, buffers), own, strict=True):
                tensor.copy_(before)
            _publish(chunks)


def _ours(chunks: Sequence[Chunk], buffers: Sequence[Tensor]) -> list[Tensor]:
    return [chunk.master for chunk in chunks if chunk.trainable] + list(buffers)


def mean_of_optimizers(optimizer: ChunkOptimizer, group: Group) -> dict[tuple[str, str], Tensor]:
    """The mean over `group` of each floating tensor of the optimizer's state that every replica has, by (parameter, key)."""
    own = optimizer.state_tensors()
    everywhere = set.intersection(*(set(keys) for keys in group.all_gather_object(list(own))))
    return {at: _average(value.clone(), group) for at, value in own.items() if at in everywhere}


def _average(tensor: Tensor, group: Group) -> Tensor:
    if not tensor.is_floating_point():
        return group.all_reduce(tensor, "max", purpose="mean of replicas")
    return group.all_reduce(tensor, purpose="mean of replicas").div_(group.size)


def _publish(chunks: Sequence[Chunk]) -> None:
    for chunk in chunks:
        chunk.publish()

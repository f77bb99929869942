"""The mean of replicas that have drifted apart, for evaluation and saving."""

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
    """Replaces masters, weights and floating buffers of `module` by their mean over `group` while the block runs.

    Counters become the largest. Afterwards this replica's own values are restored; the block takes a copy of the
    masters.
    """
    buffers = [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer in module.buffers()]
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
    """Returns the mean over `group` of each floating state tensor that every replica has, by (parameter, key)."""
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

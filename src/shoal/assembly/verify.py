"""What a rank holds and which other ranks hold the same, for their vote on it (training.vote)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor

from shoal.assembly.memory import Memory
from shoal.assembly.model import Local
from shoal.assembly.trainer import Trainer
from shoal.checkpoint.state import buffers
from shoal.chunks import Chunk
from shoal.comm import Group
from shoal.training.vote import Held


def held(local: Local, memory: Memory, trainer: Trainer) -> Iterator[Held]:
    """Yields what this rank holds of weights, masters, optimizer state and buffers, in an order that its replicas
    share. A wrong sum of gradients shows in the state that was updated with it."""
    states = defaultdict[str, list[Tensor]](list)
    for (name, _), value in sorted(trainer.optimizer.state_tensors().items(), key=lambda each: each[0]):
        states[name].append(value)
    silent = {name for axis in local.axes for name in axis.silent_buffers}
    for chunk in memory.chunks:
        copies = local.apart.get(chunk.spec.variant, local.ranks.replicas)
        owners = _owners(chunk, copies)
        kind = chunk.spec.variant + " " * bool(chunk.spec.variant)
        if not chunk.passes:
            yield Held(f"{kind}weights", chunk.data, copies)
        if chunk.passes or chunk.owned.masters is not None:
            yield Held(f"{kind}masters", chunk.owned.master_to_read, owners)
        for slot in chunk.owned.slots:
            yield from (Held(f"{kind}optimizer state", value, owners) for value in states[slot.name])
    for name, buffer in buffers(local.module):
        if name.removeprefix("buffer.") not in silent:
            yield Held("buffers", buffer, local.ranks.replicas)


def _owners(chunk: Chunk, copies: Group) -> Group | None:
    """Returns the ranks that update the same part of a chunk."""
    return copies if chunk.shards is None else chunk.shards.across

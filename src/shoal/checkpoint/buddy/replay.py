"""From a snapshot of another rank to its state of a later step: its updates are made again, by the same optimizer over
chunks laid out as its own, so the bits are the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.buddy.snapshot import About, Rest, Snapshot
from shoal.checkpoint.optimizer_state import optimizer_extra, put_back
from shoal.checkpoint.pieces import Piece, canonical
from shoal.checkpoint.role import WriterRole
from shoal.chunks import Chunk, ChunkSpec
from shoal.chunks.allocate import Private
from shoal.comm.wire import sent
from shoal.device import CPU
from shoal.optim.optimizer import ChunkOptimizer

Make = Callable[[Sequence[Chunk], Mapping[str, nn.Parameter]], ChunkOptimizer]
"""Makes an optimizer like the run's over other chunks."""


@sent
@dataclass(frozen=True)
class Made:
    """An update that all ranks have voted for: gradients times `factor` (0-dim), but left out where `skip` (0-dim) is
    not zero. `untouched`: the parameters, of those that the rank trains, that no backward has reached."""

    factor: Tensor
    skip: Tensor | None
    untouched: list[str]


@dataclass(frozen=True)
class Update:
    """What is known of the update of one step: that it was `made`, and the parameters that some rank has `reached`."""

    made: Made
    reached: Collection[str]


def replayed(
    snapshot: Snapshot, step: int, updates: Mapping[int, Update], make: Make, device: torch.device
) -> tuple[list[Piece], dict[str, Any]]:
    """Returns the pieces of the rank's state before `step`, and of the JSON state what its optimizer has.

    updates: by step, those that were made since the snapshot
    make: makes its optimizer
    device: where the updates were made that no host makes
    """
    about, rest = snapshot.about, snapshot.rest
    chunks = [
        _chunk(spec, values, CPU if spec.index in about.on_host else device)
        for spec, values in zip(about.chunks, snapshot.room.theirs, strict=False)
    ]
    frozen = [_chunk(spec, values, CPU) for spec, values in zip(about.frozen, snapshot.frozen.theirs, strict=True)]
    views = {slot.name: nn.Parameter(slot.view(chunk.data)) for chunk in chunks for slot in chunk.slots}
    optimizer = make(chunks, {name: views[name] for name in about.names})
    states = dict[str, dict[str, Tensor]]()
    for (name, key, _, _), value in zip(about.states, snapshot.room.theirs[len(chunks) :], strict=True):
        states.setdefault(name, {})[key] = value.clone()
    put_back(optimizer, states, rest.optimizer)
    buffers = rest.buffers
    for each in range(snapshot.step, step):
        facts, room = snapshot.log[each]
        buffers = facts.buffers
        if each in updates:
            _set_options(optimizer, rest, facts.options)
            _update(optimizer, chunks, room.theirs, each, updates[each], facts.untouched)
    return _pieces([*chunks, *frozen], optimizer, about, buffers), optimizer_extra(optimizer, None)


def _chunk(spec: ChunkSpec, values: Tensor, device: torch.device) -> Chunk:
    chunk = Chunk(spec, Private(device))
    with torch.no_grad():
        chunk.owned.master.copy_(values)
        chunk.rest()
    return chunk


def _set_options(optimizer: ChunkOptimizer, rest: Rest, options: Sequence[Mapping[str, Any]]) -> None:
    """Gives each group the options that the rank's group of the same parameters had."""
    of = {
        name: each for group, each in zip(rest.optimizer["groups"], options, strict=True) for name in group["members"]
    }
    for members, group in zip(optimizer.members, optimizer.torch.param_groups, strict=True):
        group.update(of[members[0]])


@torch.no_grad()
def _update(
    optimizer: ChunkOptimizer,
    chunks: Sequence[Chunk],
    gradients: Sequence[Tensor],
    step: int,
    update: Update,
    untouched: Sequence[str],
) -> None:
    made = update.made
    if made.skip is not None and bool(made.skip):
        return
    for chunk, gradient in zip(chunks, gradients, strict=True):
        chunk.gradient.copy_(gradient)
    optimizer.turn = step
    factor = made.factor.to(chunks[0].gradient.device) if chunks else made.factor
    optimizer.apply(factor, None, [name for name in untouched if name not in update.reached])


def _pieces(
    chunks: Sequence[Chunk], optimizer: ChunkOptimizer, about: About, buffers: Mapping[str, Tensor]
) -> list[Piece]:
    role = WriterRole(about.layouts).with_copies
    found = [piece for title, buffer in buffers.items() for piece in role.share(title, None, buffer)]
    for chunk in chunks:
        flat = chunk.owned.master_to_read.detach()
        for slot in chunk.slots:
            found += role.part(f"model.{slot.name}", slot, slot.view(flat).cpu())
    for (name, key), value in optimizer.state_tensors().items():
        slot = optimizer.slots[name]
        whole = slot if value.shape == slot.shape else None  # a count or the like
        found += role.part(f"optim.{name}.{key}", whole, canonical(value.detach().cpu()))
    return found

"""The engine's state as named global tensors and JSON: the contents of a checkpoint, under any plan.

model.<parameter>          the master, fp32 (fp64 under fp64)
buffer.<buffer>            in its own dtype
optim.<parameter>.<key>    optimizer state, floating tensors at least fp32
replica.<r>.model ...      the values of replica r, if replicas have drifted apart; the names without it are means
replica.<r>.loss_scale     its loss scale, under fp16; extra["loss_scale"] is that of the first replica
version.<k>.<parameter>    the weights k updates ago, if a schedule without a flush still needs them
exchange.<r>.<state>.<parameter>   the state of replica r's exchange algorithm
user.<name> ...            objects of the caller's (see user_state)
extra["groups"]            options of each optimizer group, now and as they were given, with its members by name
extra["optimizer"]         the optimizer's class
extra["optim"]             optimizer state that is not a tensor
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.optimizer_state import empty_states, put_back, put_back_of, states_wanted, that_fits
from shoal.checkpoint.pieces import Piece, Want, canonical, wants_of
from shoal.checkpoint.role import WriterRole
from shoal.checkpoint.source import Source
from shoal.chunks import Buffer, Chunk, Slot
from shoal.errors import CheckpointError, UserError
from shoal.module.buffer_values import persistent_buffers
from shoal.optim.optimizer import ChunkOptimizer
from shoal.parallel.layout import Layout

Titled = tuple[str, str | None, Tensor]
_LOSS_SCALE = "loss_scale"


def pieces(
    module: nn.Module,
    chunks: Sequence[Chunk],
    optimizer: ChunkOptimizer,
    role: WriterRole,
    means: Mapping[tuple[str, str], Tensor] | None = None,
) -> list[Piece]:
    """Returns the pieces that this rank writes of the state that replicas have in common.

    module: of this rank
    chunks: its parameters
    optimizer: of the chunks
    role: the role of this rank
    means: optimizer state to write in place of its own, if replicas have drifted apart

    Raises UserError for a parameter that is no longer a view of its chunk.
    """
    for chunk in chunks:
        for slot in chunk.slots:
            if not chunk.passes and not _is_view(module.get_parameter(slot.name), chunk, slot):
                raise UserError(
                    f"{slot.name} is no longer a view of its chunk: change parameters in place, never re-bind their "
                    "data"
                )
    states = means if means is not None else optimizer.state_tensors()
    alike, own = _named(module, chunks, optimizer, states, role.holds_copies)
    pieces = [piece for title, name, tensor in alike for piece in role.share(title, name, tensor.detach())]
    return pieces + [piece for title, slot, tensor in own for piece in role.part(title, slot, tensor.detach())]


def replica_pieces(
    module: nn.Module,
    chunks: Sequence[Chunk],
    optimizer: ChunkOptimizer,
    role: WriterRole,
    loss_scale: Tensor | None = None,
) -> list[Piece]:
    """Returns the pieces of the state that only this rank's replica has, for replicas that have drifted apart.
    `loss_scale`: the numbers of its loss scale."""
    named = [*_state(module, chunks)]
    named += [] if loss_scale is None else [(_LOSS_SCALE, None, loss_scale)]
    named += [
        (f"optim.{name}.{key}", name, canonical(value)) for (name, key), value in optimizer.state_tensors().items()
    ]
    alone, before = role.alone, f"replica.{role.rank}."
    return [
        piece
        for title, name, tensor in named
        for piece in alone.share(before + title, name, canonical(tensor.detach()))
    ]


def scale_of_replica(source: Source, own: str) -> list[float] | None:
    """Returns the numbers of the loss scale of the replica with the prefix `own`; None where `source` has none."""
    shape = source.shapes().get(own + _LOSS_SCALE)
    if shape is None:
        return None
    found = torch.zeros(shape, dtype=torch.float64)
    source.load(wants_of(own + _LOSS_SCALE, Layout.replicated(shape), found))
    return found.tolist()


def buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the persistent buffers, with their names in a checkpoint."""
    return [(f"buffer.{name}", buffer) for name, _, buffer in persistent_buffers(module)]


def restore(
    source: Source,
    module: nn.Module,
    chunks: Sequence[Chunk],
    optimizer: ChunkOptimizer | None,
    role: WriterRole,
    own: str = "",
) -> dict[str, Any]:
    """Reads model, buffers and optimizer state from `source` in place; returns its JSON state.

    module, chunks: of this rank
    optimizer: of the chunks; None: its state is not read
    role: the role of this rank
    own: prefix "replica.<r>." to read a replica's own values; "": those in common

    The result has a line in "anew" if the optimizer cannot take over the saved state.
    """
    saved = source.shapes()
    _check_shapes(source.name, saved, chunks, role)
    pages = optimizer.pages if optimizer is not None else []
    elsewhere = {slot.name for page in pages for slot in page.chunk.slots}
    alike = _state(module, [chunk for chunk in chunks if not chunk.is_cut])
    wants = [want for title, name, tensor in alike for want in wants_of(own + title, role.layout(name, tensor), tensor)]
    for chunk in chunks:
        if chunk.is_cut and not any(page.chunk is chunk.owned and page.has_master for page in pages):
            wants += _masters_wanted(chunk.owned, role)
    states: dict[str, dict[str, Tensor]] = {}
    anew = ""
    if optimizer is not None:
        saved, plain, anew = that_fits(source.extra, optimizer, saved)
        states = empty_states(saved, optimizer, role, own, optimizer.known.keys() - elsewhere)
        wants += states_wanted(optimizer, states, role, own)
    with torch.no_grad():
        source.load(wants)
        extra = {**source.extra, "anew": anew}
        for chunk in chunks:
            chunk.publish()
    if optimizer is not None:
        extra["optim"] = plain
        put_back(optimizer, states, extra)
    for page in pages:  # one by one: memory has no room for all of them
        assert optimizer is not None
        with torch.no_grad(), page.there():
            names = {slot.name for slot in page.chunk.slots}
            states = empty_states(saved, optimizer, role, own, names)
            masters = _masters_wanted(page.chunk, role) if page.has_master else []
            source.load(states_wanted(optimizer, states, role, own) + masters)
            put_back_of(names, optimizer, states, extra)
            page.chunk.rest()
    return extra


def restore_small(
    module: nn.Module, optimizer: ChunkOptimizer, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> None:
    """Restores `buffers` and `small_state` from `tensors`, and the plain values of the optimizer from `extra`."""
    states: dict[str, dict[str, Tensor]] = {}
    for title, tensor in tensors.items():
        if title.startswith("optim."):
            name, _, key = title.removeprefix("optim.").rpartition(".")
            states.setdefault(name, {})[key] = tensor
    put_back(optimizer, states, extra)
    with torch.no_grad():
        for name, buffer in buffers(module):
            buffer.copy_(tensors[name])


def _is_view(parameter: Tensor, chunk: Chunk, slot: Slot) -> bool:
    mine, its = parameter.untyped_storage(), chunk.data.untyped_storage()
    return mine._cdata == its._cdata and parameter.storage_offset() == chunk.data.storage_offset() + slot.offset


def _named(
    module: nn.Module,
    chunks: Sequence[Chunk],
    optimizer: ChunkOptimizer,
    states: Mapping[tuple[str, str], Tensor],
    copies_too: bool,
) -> tuple[list[Titled], list[tuple[str, Slot | None, Tensor]]]:
    """Returns the tensors that are equal on all replicas, and those of which this rank owns the part in a slot;
    `copies_too`: also a part of which another rank has the first copy."""
    alike = _state(module, [chunk for chunk in chunks if not chunk.is_cut])
    stretches = [chunk.owned for chunk in chunks if chunk.is_cut and (copies_too or not chunk.copy_number)]
    cut = {slot.name for chunk in chunks if chunk.is_cut for slot in chunk.owned.slots}
    copies = set[str]()
    if not copies_too:
        copies = {slot.name for chunk in chunks if chunk.copy_number for slot in chunk.owned.slots}
    own: list[tuple[str, Slot | None, Tensor]] = []
    for owned in stretches:
        flat = owned.master_to_read
        own += [(f"model.{slot.name}", slot, slot.view(flat)) for slot in owned.slots]
    for (name, key), value in states.items():
        slot, title = optimizer.slots[name], f"optim.{name}.{key}"
        if name in copies:
            continue
        if name not in cut:
            alike.append((title, name, canonical(value)))
        elif value.shape == slot.shape:
            own.append((title, slot, canonical(value)))
        elif slot.start == 0 or copies_too:  # a count or the like, the same for all owners of a part
            own.append((title, None, canonical(value)))
    return alike, own


def _state(module: nn.Module, chunks: Sequence[Chunk]) -> list[Titled]:
    return [*_model(chunks), *((title, None, buffer) for title, buffer in buffers(module))]


def _model(chunks: Sequence[Chunk]) -> Iterator[Titled]:
    return ((f"model.{slot.name}", slot.name, slot.view(chunk.master)) for chunk in chunks for slot in chunk.slots)


def _masters_wanted(owned: Buffer, role: WriterRole) -> list[Want]:
    wants = []
    for slot in owned.slots:
        wants += wants_of(f"model.{slot.name}", role.layouts[slot.name], slot.view(owned.master), slot.start)
    return wants


def _check_shapes(source: str, saved: Mapping[str, tuple[int, ...]], chunks: Sequence[Chunk], role: WriterRole) -> None:
    """Raises CheckpointError, on every rank alike, if a parameter is missing or has another shape, whoever owns it."""
    for chunk in chunks:
        for slot in chunk.slots:
            there = saved.get(f"model.{slot.name}")
            if there is None:
                raise CheckpointError(f"{source} does not hold model.{slot.name}")
            wanted = role.layouts[slot.name].shape
            if there != wanted:
                raise CheckpointError(f"{source}: model.{slot.name} has shape {there}, the model wants {wanted}")

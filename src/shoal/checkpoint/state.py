"""The engine's state as named global tensors and JSON: what a checkpoint holds, whatever the plan.

model.<parameter>          the master, fp32 (fp64 under fp64)
buffer.<buffer>            as it is
optim.<parameter>.<key>    optimizer state, floating ones at least fp32
replica.<r>.model ...      what replica r of those that have drifted apart has itself; the names without it then are means
exchange.<r>.<state>.<parameter>   what replica r's exchange algorithm keeps
extra["groups"]            options of each optimizer group with its members, by name
extra["optim"]             optimizer state that is not a tensor
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.pieces import Piece, Want, parts_of_range, share
from shoal.checkpoint.reader import load, tensor_shapes
from shoal.chunks import Chunk, Slot
from shoal.comm import Group
from shoal.errors import CheckpointError, UserError
from shoal.optimizer import ChunkOptimizer
from shoal.parallel.layout import Box

_CHOICES = ("fused", "foreach", "capturable", "differentiable")
"""Options that say how an optimizer runs here, not what it computes: never taken from a checkpoint."""


def pieces(
    module: nn.Module,
    chunks: Sequence[Chunk],
    optimizer: ChunkOptimizer,
    rank: int,
    size: int,
    means: Mapping[tuple[str, str], Tensor] | None = None,
) -> list[Piece]:
    """What `rank` of `size` equal replicas writes; `means` stands in for the state of optimizers that are not equal. Raises UserError
    for a parameter that something has moved out of its chunk."""
    for chunk in chunks:
        for slot in chunk.slots:
            if not chunk.passes and not _is_view(module.get_parameter(slot.name), chunk, slot):
                raise UserError(
                    f"{slot.name} is no longer a view of its chunk: change parameters in place, never re-bind their data"
                )
    states = means if means is not None else optimizer.state_tensors()
    alike, own = _named(module, chunks, optimizer, states)
    pieces = [piece for name, tensor in alike for piece in share(name, tensor.detach(), tuple(tensor.shape), rank, size)]
    for name, slot, tensor in own:
        shape, flat = tuple(slot.full), tensor.detach().reshape(-1)
        pieces += [Piece(name, shape, box, part) for box, part in parts_of_range(shape, slot.start, flat)]
    return pieces


def _is_view(parameter: Tensor, chunk: Chunk, slot: Slot) -> bool:
    mine, its = parameter.untyped_storage(), chunk.data.untyped_storage()
    return mine._cdata == its._cdata and parameter.storage_offset() == chunk.data.storage_offset() + slot.offset


def _named(
    module: nn.Module, chunks: Sequence[Chunk], optimizer: ChunkOptimizer, states: Mapping[tuple[str, str], Tensor]
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Slot, Tensor]]]:
    """The tensors that all replicas have alike, and those of which this rank owns what lies in a slot."""
    alike = _state(module, [chunk for chunk in chunks if not chunk.is_cut])
    stretches = [chunk.owned for chunk in chunks if chunk.is_cut and not chunk.copy_number]
    cut = {slot.name for chunk in chunks if chunk.is_cut for slot in chunk.owned.slots}
    copies = {slot.name for chunk in chunks if chunk.copy_number for slot in chunk.owned.slots}
    own = []
    for owned in stretches:
        flat = owned.master_to_read
        own += [(f"model.{slot.name}", slot, slot.view(flat)) for slot in owned.slots]
    for (name, key), value in states.items():
        slot, title = optimizer.slots[name], f"optim.{name}.{key}"
        if name in copies:
            continue
        if name not in cut:
            alike.append((title, _canonical(value)))
        elif value.shape == slot.shape:
            own.append((title, slot, _canonical(value)))
        elif slot.start == 0:  # a count and the like, which every owner of a part has: the first one writes it
            whole = Slot(name, value.shape, 0)
            own.append((title, whole, _canonical(value)))
    return alike, own


def replica_pieces(module: nn.Module, chunks: Sequence[Chunk], optimizer: ChunkOptimizer, rank: int) -> list[Piece]:
    """What `rank` alone has of replicas that have drifted apart."""
    named = [*_state(module, chunks)]
    named += [(f"optim.{name}.{key}", _canonical(value)) for (name, key), value in optimizer.state_tensors().items()]
    return [_whole(f"replica.{rank}.{name}", tensor) for name, tensor in named]


def exchange_pieces(states: Mapping[str, Mapping[str, Tensor]], rank: int) -> list[Piece]:
    """What the exchange algorithm of `rank` keeps, by state and parameter."""
    return [_whole(f"exchange.{rank}.{state}.{name}", t) for state, tensors in states.items() for name, t in tensors.items()]


def _whole(name: str, tensor: Tensor) -> Piece:
    return Piece(name, tuple(tensor.shape), Box.whole(tuple(tensor.shape)), _canonical(tensor.detach()))


def _state(module: nn.Module, chunks: Sequence[Chunk]) -> list[tuple[str, Tensor]]:
    return [*_model(chunks), *buffers(module)]


def in_the_form_of(fresh: Any, saved: Any) -> Any:
    """`saved`, which went through JSON, with the types of `fresh`: number keys, tuples, the class of a mapping (a Counter)."""
    if isinstance(fresh, Mapping) and isinstance(saved, Mapping):
        numbers = bool(fresh) and all(isinstance(key, int) for key in fresh)
        back = {int(key) if numbers else key: value for key, value in saved.items()}
        return type(fresh)({key: in_the_form_of(fresh.get(key), value) for key, value in back.items()})  # type: ignore[call-arg]
    if isinstance(fresh, (list, tuple)) and isinstance(saved, list):
        if len(fresh) != len(saved):
            return type(fresh)(saved)
        return type(fresh)(in_the_form_of(a, b) for a, b in zip(fresh, saved, strict=True))
    return saved


def optimizer_extra(optimizer: ChunkOptimizer, owners: Group | None) -> dict[str, Any]:
    """Options and plain values of the optimizer, for JSON. `owners`: the ranks that have its parts, which all call it."""
    groups = [
        {"members": members, "options": {key: value for key, value in group.items() if key not in ("params", *_CHOICES)}}
        for members, group in zip(optimizer.members, optimizer.torch.param_groups, strict=True)
    ]
    plain = {
        name: {key: value for key, value in optimizer.torch.state.get(parameter, {}).items() if not isinstance(value, Tensor)}
        for name, parameter in optimizer.known.items()
    }
    plain = {name: values for name, values in plain.items() if values}
    for theirs in owners.all_gather_object(plain) if owners is not None else ():
        plain.update(theirs)
    return {"groups": groups, "optim": plain}


def restore(
    path: Path, module: nn.Module, chunks: Sequence[Chunk], optimizer: ChunkOptimizer | None, own: str = ""
) -> dict[str, Any]:
    """Reads model, buffers and (unless None) optimizer state of `path` in place; returns the checkpoint's `extra`.

    `own` is the prefix "replica.<r>." of a replica's own values, where they are wanted.
    """
    saved = tensor_shapes(path)
    _check_shapes(path, saved, chunks)
    pages = optimizer.pages if optimizer is not None else []
    elsewhere = {slot.name for page in pages for slot in page.chunk.slots}
    wants = [_want(own + name, tensor) for name, tensor in _state(module, [chunk for chunk in chunks if not chunk.is_cut])]
    for chunk in chunks:
        if chunk.is_cut and not any(page.chunk is chunk.owned and page.has_master for page in pages):
            wants += _masters_wanted(chunk.owned)
    states: dict[str, dict[str, Tensor]] = {}
    if optimizer is not None:
        states = _empty_states(saved, optimizer, own, optimizer.known.keys() - elsewhere)
        wants += _states_wanted(optimizer, states, own)
    with torch.no_grad():
        extra = load(path, wants)
        for chunk in chunks:
            chunk.publish()
    if optimizer is not None:
        _put_back(optimizer, states, extra)
    for page in pages:  # one after the other: there is no room for all of them
        assert optimizer is not None
        with torch.no_grad(), page.there():
            names = {slot.name for slot in page.chunk.slots}
            states = _empty_states(saved, optimizer, own, names)
            load(path, _states_wanted(optimizer, states, own) + (_masters_wanted(page.chunk) if page.has_master else []))
            for name in names:
                optimizer.torch.state[optimizer.known[name]] = {**states.get(name, {}), **extra["optim"].get(name, {})}
            page.chunk.rest()
    return extra


def _masters_wanted(owned: Chunk) -> list[Want]:
    return [want for slot in owned.slots for want in _wants_of(f"model.{slot.name}", slot, slot.view(owned.master))]


def _states_wanted(optimizer: ChunkOptimizer, states: Mapping[str, Mapping[str, Tensor]], own: str) -> list[Want]:
    wants = []
    for name, values in states.items():
        for key, tensor in values.items():
            slot, title = optimizer.slots[name], f"{own}optim.{name}.{key}"
            wants += _wants_of(title, slot, tensor) if slot.whole is not None and tensor.dim() else [_want(title, tensor)]
    return wants


def buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The persistent buffers by their names in a checkpoint."""
    return [(f"buffer.{name}", buffer) for name, buffer in _persistent_buffers(module)]


def small_state(optimizer: ChunkOptimizer) -> dict[str, Tensor]:
    """What of the optimizer's state no page holds: what a generation on the disk needs beside pages and buffers."""
    paged = {(name, key) for page in optimizer.pages for name, keys in page.known().items() for key in keys}
    return {
        f"optim.{name}.{key}": value
        for name, parameter in optimizer.known.items()
        for key, value in optimizer.torch.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and (name, key) not in paged
    }


def restore_small(module: nn.Module, optimizer: ChunkOptimizer, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> None:
    """Puts back `buffers` and `small_state` from `tensors`, and what of the optimizer `extra` says."""
    states: dict[str, dict[str, Tensor]] = {}
    for title, tensor in tensors.items():
        if title.startswith("optim."):
            name, _, key = title.removeprefix("optim.").rpartition(".")
            states.setdefault(name, {})[key] = tensor
    _put_back(optimizer, states, extra)
    with torch.no_grad():
        for name, buffer in buffers(module):
            buffer.copy_(tensors[name])


def _check_shapes(path: Path, saved: Mapping[str, tuple[int, ...]], chunks: Sequence[Chunk]) -> None:
    """CheckpointError, on every rank alike, where a parameter is missing or of another shape, whoever owns it."""
    for chunk in chunks:
        for slot in chunk.slots:
            there = saved.get(f"model.{slot.name}")
            if there is None:
                raise CheckpointError(f"{path} does not hold model.{slot.name}")
            if there != tuple(slot.shape):
                raise CheckpointError(f"{path}: model.{slot.name} has shape {there}, the model wants {tuple(slot.shape)}")


def restore_exchange(path: Path, states: Mapping[str, tuple[Mapping[str, Tensor], str]], rank: int, size: int) -> bool:
    """Reads {state: (tensors by parameter, what a resize does: "split", "whole" or "mean")} of an exchange algorithm in place.

    False, and nothing is read, where the checkpoint holds none of them: it was written under another algorithm, or before it had any.
    """
    saved = tensor_shapes(path)
    before = 1 + max((int(name.split(".")[1]) for name in saved if name.startswith("exchange.")), default=-1)
    if any(f"exchange.0.{state}.{name}" not in saved for state, (tensors, _) in states.items() for name in tensors):
        return False
    if before == size:
        mine = (
            (f"exchange.{rank}.{state}.{name}", tensor)
            for state, (tensors, _) in states.items()
            for name, tensor in tensors.items()
        )
        load(path, [_want(name, tensor) for name, tensor in mine])
        return True
    for state, (tensors, on_resize) in states.items():
        parts = {"split": size, "whole": 1, "mean": before}[on_resize]
        for replica in range(before):  # one after the other: all of them at once would be as many times the memory
            theirs = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            load(path, [_want(f"exchange.{replica}.{state}.{name}", into) for name, into in theirs.items()])
            for name, tensor in tensors.items():
                tensor.copy_(theirs[name] if replica == 0 else tensor + theirs[name])
        for tensor in tensors.values():
            tensor.copy_(tensor / parts)
    return True


def _want(name: str, into: Tensor) -> Want:
    return Want(name, tuple(into.shape), Box.whole(tuple(into.shape)), into)


def _wants_of(name: str, slot: Slot, into: Tensor) -> list[Want]:
    """The part of the global tensor `name` that lies in `slot`."""
    shape = tuple(slot.full)
    return [Want(name, shape, box, part) for box, part in parts_of_range(shape, slot.start, into.view(-1))]


def _model(chunks: Sequence[Chunk]) -> Iterator[tuple[str, Tensor]]:
    return ((f"model.{slot.name}", slot.view(chunk.master)) for chunk in chunks for slot in chunk.slots)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _canonical(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _empty_states(
    saved: Mapping[str, tuple[int, ...]], optimizer: ChunkOptimizer, own: str, names: Collection[str]
) -> dict[str, dict[str, Tensor]]:
    """Tensors to read the saved optimizer state of the parameters `names` into, by parameter and key."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, parameter in optimizer.known.items():
        if name not in names:
            continue
        prefix = f"{own}optim.{name}."
        for key, shape in saved.items():
            if key.startswith(prefix) and "." not in key[len(prefix) :]:
                slot = optimizer.slots[name]
                if shape == tuple(slot.full):
                    empty = torch.zeros(slot.shape, dtype=parameter.dtype, device=parameter.device)
                else:
                    empty = torch.zeros(shape)
                states.setdefault(name, {})[key[len(prefix) :]] = empty
    return states


def _put_back(optimizer: ChunkOptimizer, states: Mapping[str, dict[str, Tensor]], extra: Mapping[str, Any]) -> None:
    """Hands the state to the optimizer through its own `load_state_dict`, which knows where each key belongs."""
    saved_options = {name: group["options"] for group in extra["groups"] for name in group["members"]}
    names = {id(parameter): name for name, parameter in optimizer.known.items()}
    current = optimizer.torch.state_dict()
    state: dict[int, dict[str, Any]] = {}
    described = zip(optimizer.torch.param_groups, current["param_groups"], optimizer.members, strict=True)
    for group, packed, members in described:
        options = saved_options.get(members[0], {})
        packed.update({key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            name = names[id(parameter)]
            values = {**states.get(name, {}), **extra["optim"].get(name, {})}
            if values:
                state[index] = values
    optimizer.torch.load_state_dict({"state": state, "param_groups": current["param_groups"]})

"""The engine's state as named global tensors and JSON: the contents of a checkpoint, under any plan.

model.<parameter>          the master, fp32 (fp64 under fp64)
buffer.<buffer>            in its own dtype
optim.<parameter>.<key>    optimizer state, floating tensors at least fp32
replica.<r>.model ...      the values of replica r, if replicas have drifted apart; the names without it are means
version.<k>.<parameter>    the weights k updates ago, if a schedule without a flush still needs them
exchange.<r>.<state>.<parameter>   the state of replica r's exchange algorithm
extra["groups"]            options of each optimizer group, now and as they were given, with its members by name
extra["optimizer"]         the optimizer's class
extra["optim"]             optimizer state that is not a tensor
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.given import as_json, options_to_go_on, state_that_fits
from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.pieces import Piece, Want, share
from shoal.checkpoint.reader import load, tensor_shapes
from shoal.chunks import Buffer, Chunk, Slot
from shoal.comm import Group
from shoal.errors import CheckpointError, UserError
from shoal.optim.groups import CHOICES
from shoal.optim.optimizer import ChunkOptimizer
from shoal.parallel.layout import Box, Layout


@dataclass(frozen=True)
class Standing:
    """The role of this rank in writing a checkpoint: what it holds, and its share of the writing.

    layouts: what it holds of each parameter
    rank, size: its index among the replicas
    place, places: its index among the ranks that have the parts of one model
    apart: the roles for parameters that other ranks replicate (see Layout.apart): experts have fewer replicas of more
        parts, weights tied across stages have more replicas
    silent: buffers that this rank does not write, since the last stage, which runs all of the model's forward, has them
        too
    """

    layouts: Mapping[str, Layout]
    rank: int = 0
    size: int = 1
    place: int = 0
    places: int = 1
    apart: Mapping[str, Standing] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()

    def of(self, name: str | None) -> Standing:
        """Returns the role for the parameter `name`."""
        layout = None if name is None else self.layouts.get(name)
        return self if layout is None else self.apart.get(layout.apart, self)

    def layout(self, name: str | None, tensor: Tensor, slot: Slot | None = None) -> Layout:
        """Returns the layout of `tensor`: that of the parameter `name` if the shapes agree, else a replicated one.

        `slot`: the tensor is the part of the parameter in this slot.
        """
        layout = None if name is None else self.layouts.get(name)
        if layout is not None and tensor.shape == (torch.Size(layout.own_shape) if slot is None else slot.shape):
            return layout
        return Layout.replicated(tuple(tensor.shape))

    def share(self, title: str, name: str | None, tensor: Tensor) -> list[Piece]:
        """Returns the pieces that this rank writes of a tensor that is equal on all replicas."""
        layout, mine = self.layout(name, tensor), self.of(name)
        if title in self.silent:
            return []
        if layout.alike:
            return share(title, tensor, layout, mine.rank * self.places + self.place, mine.size * self.places)
        return share(title, tensor, layout, mine.rank, mine.size)

    def part(self, title: str, slot: Slot | None, tensor: Tensor) -> list[Piece]:
        """Returns the pieces that this rank writes of a tensor that only its replica has.

        `slot`: the tensor is the part of a parameter, or of its state, in this slot; None: it is whole.
        """
        layout = Layout.replicated(tuple(tensor.shape)) if slot is None else self.layouts[slot.name]
        flat, start = tensor.reshape(-1), 0 if slot is None else slot.start
        if layout.alike and self.places > 1:  # the other ranks of this replica have the same
            first, last = (flat.numel() * place // self.places for place in (self.place, self.place + 1))
            flat, start = flat[first:last], start + first
        return [Piece(title, layout.shape, box, part) for box, part in layout.boxes(start, flat)]

    @property
    def alone(self) -> Standing:
        """This role as that of the only replica."""
        return replace(self, rank=0, size=1, apart={kind: mine.alone for kind, mine in self.apart.items()})


def pieces(
    module: nn.Module,
    chunks: Sequence[Chunk],
    optimizer: ChunkOptimizer,
    standing: Standing,
    means: Mapping[tuple[str, str], Tensor] | None = None,
) -> list[Piece]:
    """Returns the pieces that this rank writes of the state that replicas have in common.

    module: of this rank
    chunks: its parameters
    optimizer: of the chunks
    standing: the role of this rank
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
    alike, own = _named(module, chunks, optimizer, states)
    pieces = [piece for title, name, tensor in alike for piece in standing.share(title, name, tensor.detach())]
    return pieces + [piece for title, slot, tensor in own for piece in standing.part(title, slot, tensor.detach())]


def _is_view(parameter: Tensor, chunk: Chunk, slot: Slot) -> bool:
    mine, its = parameter.untyped_storage(), chunk.data.untyped_storage()
    return mine._cdata == its._cdata and parameter.storage_offset() == chunk.data.storage_offset() + slot.offset


def _named(
    module: nn.Module, chunks: Sequence[Chunk], optimizer: ChunkOptimizer, states: Mapping[tuple[str, str], Tensor]
) -> tuple[list[Titled], list[tuple[str, Slot | None, Tensor]]]:
    """Returns the tensors that are equal on all replicas, and those of which this rank owns the part in a slot."""
    alike = _state(module, [chunk for chunk in chunks if not chunk.is_cut])
    stretches = [chunk.owned for chunk in chunks if chunk.is_cut and not chunk.copy_number]
    cut = {slot.name for chunk in chunks if chunk.is_cut for slot in chunk.owned.slots}
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
            alike.append((title, name, _canonical(value)))
        elif value.shape == slot.shape:
            own.append((title, slot, _canonical(value)))
        elif slot.start == 0:  # a count or the like, the same for all owners of a part: the first one writes it
            own.append((title, None, _canonical(value)))
    return alike, own


def replica_pieces(
    module: nn.Module, chunks: Sequence[Chunk], optimizer: ChunkOptimizer, standing: Standing
) -> list[Piece]:
    """Returns the pieces of the state that only this rank's replica has, for replicas that have drifted apart."""
    named = [*_state(module, chunks)]
    named += [
        (f"optim.{name}.{key}", name, _canonical(value)) for (name, key), value in optimizer.state_tensors().items()
    ]
    alone, before = standing.alone, f"replica.{standing.rank}."
    return [
        piece
        for title, name, tensor in named
        for piece in alone.share(before + title, name, _canonical(tensor.detach()))
    ]


def version_pieces(versions: Mapping[int, Mapping[str, Tensor]], standing: Standing) -> list[Piece]:
    """Returns the pieces that this rank writes of earlier weights, given as {number of updates ago: {parameter:
    tensor}}.

    They are equal on all replicas.
    """
    return [
        piece
        for ago, tensors in versions.items()
        for name, tensor in tensors.items()
        for piece in standing.share(f"version.{ago}.{name}", name, _canonical(tensor.detach()))
    ]


def versions_saved(path: Path, names: Collection[str], most: int) -> list[int]:
    """Returns the versions 1, 2, .. (updates ago) of the weights `names` that `path` has, without gaps, at most
    `most`."""
    saved, found = tensor_shapes(path), list[int]()
    while len(found) < most and all(f"version.{len(found) + 1}.{name}" in saved for name in names):
        found.append(len(found) + 1)
    return found


@torch.no_grad()
def restore_versions(path: Path, versions: Mapping[int, Mapping[str, Tensor]], standing: Standing) -> None:
    """Reads earlier weights in place, given as for `version_pieces`."""
    for ago, tensors in versions.items():
        read = {name: torch.empty(tensor.shape, dtype=_canonical(tensor[:0]).dtype) for name, tensor in tensors.items()}
        load(
            path,
            [
                want
                for name, into in read.items()
                for want in _wants(f"version.{ago}.{name}", standing.layout(name, into), into)
            ],
        )
        for name, tensor in tensors.items():
            tensor.copy_(read[name])


def exchange_pieces(states: Mapping[str, Mapping[str, Tensor]], standing: Standing) -> list[Piece]:
    """Returns the pieces of the exchange algorithm's state on this rank's replica, given as {state: {parameter:
    tensor}}."""
    found = []
    for state, tensors in states.items():
        for name, tensor in tensors.items():
            title = _exchange_title(standing.of(name).rank, state, name, tensor, standing)
            writer = Standing(standing.layouts) if "@" in title else standing.of(name).alone
            found += writer.share(title, name, _canonical(tensor.detach()))
    return found


def _exchange_title(rank: int, state: str, name: str, tensor: Tensor, standing: Standing) -> str:
    """Returns the checkpoint's name for a tensor of an exchange algorithm.

    If the parameter is cut and the state is not laid out as it, the name includes the part.
    """
    own = name in standing.layouts and not standing.layouts[name].alike and standing.layout(name, tensor).alike
    mine = standing.of(name)
    return f"exchange.{rank}.{state}.{name}" + (f"@{mine.place}of{mine.places}" if own else "")


Titled = tuple[str, str | None, Tensor]
"""(name in a checkpoint, name of the parameter whose layout it has or None, tensor)."""


def _state(module: nn.Module, chunks: Sequence[Chunk]) -> list[Titled]:
    return [*_model(chunks), *((title, None, buffer) for title, buffer in buffers(module))]


def in_the_form_of(fresh: Any, saved: Any) -> Any:
    """Returns `saved`, which went through JSON, with the types of `fresh`: number keys, tuples, classes of mappings."""
    if isinstance(fresh, Mapping) and isinstance(saved, Mapping):
        numbers = bool(fresh) and all(isinstance(key, int) for key in fresh)
        back = {int(key) if numbers else key: value for key, value in saved.items()}
        return type(fresh)(  # type: ignore[call-arg]
            {key: in_the_form_of(fresh.get(key), value) for key, value in back.items()}
        )
    if isinstance(fresh, (list, tuple)) and isinstance(saved, list):
        if len(fresh) != len(saved):
            return type(fresh)(saved)
        return type(fresh)(in_the_form_of(a, b) for a, b in zip(fresh, saved, strict=True))
    return saved


def optimizer_extra(optimizer: ChunkOptimizer, owners: Group | None, across: Group | None = None) -> dict[str, Any]:
    """Returns options and plain values of the optimizer, for JSON. Collective over both groups.

    optimizer: of this rank
    owners: the ranks that have the parts of its state; None: it is whole
    across: the ranks that have other pipeline stages; None: there are none
    """
    groups = [
        {
            "members": members,
            "options": {key: value for key, value in group.items() if key not in ("params", *CHOICES)},
            "given": as_json(given),
        }
        for members, group, given in zip(optimizer.members, optimizer.torch.param_groups, optimizer.given, strict=True)
    ]
    plain = {
        name: {
            key: value
            for key, value in optimizer.torch.state.get(parameter, {}).items()
            if not isinstance(value, Tensor)
        }
        for name, parameter in optimizer.known.items()
    }
    plain = {name: values for name, values in plain.items() if values}
    for theirs in owners.all_gather_object(plain) if owners is not None else ():
        plain.update(theirs)
    if across is not None:
        stages = across.all_gather_object((groups, plain))
        groups = [group for theirs, _ in stages for group in theirs]
        plain = {name: values for _, theirs in stages for name, values in theirs.items()}
    return {"groups": groups, "optim": plain, "optimizer": optimizer.kind}


def restore(
    path: Path,
    module: nn.Module,
    chunks: Sequence[Chunk],
    optimizer: ChunkOptimizer | None,
    standing: Standing,
    own: str = "",
) -> dict[str, Any]:
    """Reads model, buffers and optimizer state of the checkpoint at `path` in place; returns its JSON state.

    module, chunks: of this rank
    optimizer: of the chunks; None: its state is not read
    standing: the role of this rank
    own: prefix "replica.<r>." to read a replica's own values; "": those in common

    The result has a line in "anew" if the optimizer cannot take over the saved state.
    """
    saved = tensor_shapes(path)
    _check_shapes(path, saved, chunks, standing)
    pages = optimizer.pages if optimizer is not None else []
    elsewhere = {slot.name for page in pages for slot in page.chunk.slots}
    alike = _state(module, [chunk for chunk in chunks if not chunk.is_cut])
    wants = [
        want for title, name, tensor in alike for want in _wants(own + title, standing.layout(name, tensor), tensor)
    ]
    for chunk in chunks:
        if chunk.is_cut and not any(page.chunk is chunk.owned and page.has_master for page in pages):
            wants += _masters_wanted(chunk.owned, standing)
    states: dict[str, dict[str, Tensor]] = {}
    anew = ""
    if optimizer is not None:
        saved, plain, anew = _that_fits(path, optimizer, saved)
        states = _empty_states(saved, optimizer, standing, own, optimizer.known.keys() - elsewhere)
        wants += _states_wanted(optimizer, states, standing, own)
    with torch.no_grad():
        extra = {**load(path, wants), "anew": anew}
        for chunk in chunks:
            chunk.publish()
    if optimizer is not None:
        extra["optim"] = plain
        _put_back(optimizer, states, extra)
    for page in pages:  # one by one: memory has no room for all of them
        assert optimizer is not None
        with torch.no_grad(), page.there():
            names = {slot.name for slot in page.chunk.slots}
            states = _empty_states(saved, optimizer, standing, own, names)
            masters = _masters_wanted(page.chunk, standing) if page.has_master else []
            load(path, _states_wanted(optimizer, states, standing, own) + masters)
            for name in names:
                optimizer.torch.state[optimizer.known[name]] = {**states.get(name, {}), **extra["optim"].get(name, {})}
            page.chunk.rest()
    return extra


def _that_fits(
    path: Path, optimizer: ChunkOptimizer, saved: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, dict[str, Any]], str]:
    """Returns the checkpoint's tensors and its plain values, without optimizer state that `optimizer` does not take
    over, and a line about that."""
    about = read_manifest(path).extra
    keys, anew = state_that_fits(optimizer, about, saved)
    kept = {
        title: shape
        for title, shape in saved.items()
        if not _is_optimizer_state(title) or title.rpartition(".")[2] in keys
    }
    plain = {name: {key: value for key, value in each.items() if key in keys} for name, each in about["optim"].items()}
    return kept, plain, anew


def _is_optimizer_state(title: str) -> bool:
    return (title.split(".", 2)[2] if title.startswith("replica.") else title).startswith("optim.")


def _masters_wanted(owned: Buffer, standing: Standing) -> list[Want]:
    wants = []
    for slot in owned.slots:
        wants += _wants(f"model.{slot.name}", standing.layouts[slot.name], slot.view(owned.master), slot.start)
    return wants


def _states_wanted(
    optimizer: ChunkOptimizer, states: Mapping[str, Mapping[str, Tensor]], standing: Standing, own: str
) -> list[Want]:
    wants = []
    for name, values in states.items():
        for key, tensor in values.items():
            slot = optimizer.slots[name]
            layout = standing.layout(name, tensor, slot)
            start = slot.start if layout is standing.layouts[name] else 0
            wants += _wants(f"{own}optim.{name}.{key}", layout, tensor, start)
    return wants


def buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the persistent buffers, with their names in a checkpoint."""
    return [(f"buffer.{name}", buffer) for name, buffer in _persistent_buffers(module)]


def small_state(optimizer: ChunkOptimizer) -> dict[str, Tensor]:
    """Returns the optimizer state outside of pages, which a generation on the disk needs besides pages and buffers."""
    paged = {(name, key) for page in optimizer.pages for name, keys in page.known().items() for key in keys}
    return {
        f"optim.{name}.{key}": value
        for name, parameter in optimizer.known.items()
        for key, value in optimizer.torch.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and (name, key) not in paged
    }


def restore_small(
    module: nn.Module, optimizer: ChunkOptimizer, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]
) -> None:
    """Restores `buffers` and `small_state` from `tensors`, and the plain values of the optimizer from `extra`."""
    states: dict[str, dict[str, Tensor]] = {}
    for title, tensor in tensors.items():
        if title.startswith("optim."):
            name, _, key = title.removeprefix("optim.").rpartition(".")
            states.setdefault(name, {})[key] = tensor
    _put_back(optimizer, states, extra)
    with torch.no_grad():
        for name, buffer in buffers(module):
            buffer.copy_(tensors[name])


def _check_shapes(
    path: Path, saved: Mapping[str, tuple[int, ...]], chunks: Sequence[Chunk], standing: Standing
) -> None:
    """Raises CheckpointError, on every rank alike, if a parameter is missing or has another shape, whoever owns it."""
    for chunk in chunks:
        for slot in chunk.slots:
            there = saved.get(f"model.{slot.name}")
            if there is None:
                raise CheckpointError(f"{path} does not hold model.{slot.name}")
            wanted = standing.layouts[slot.name].shape
            if there != wanted:
                raise CheckpointError(f"{path}: model.{slot.name} has shape {there}, the model wants {wanted}")


def restore_exchange(path: Path, states: Mapping[str, tuple[Mapping[str, Tensor], str]], standing: Standing) -> bool:
    """Reads the state of an exchange algorithm in place.

    `states`: {state: (tensors by parameter, effect of a resize: "split", "whole" or "mean")}. Returns False if the
    checkpoint lacks some of them, which stay as they are: it was written under another algorithm, before it had any, or
    under another cut of parameters with a state that is not laid out as they are.
    """
    saved = tensor_shapes(path)
    replicas = _replicas(saved)

    def wants(replica: int, state: str, tensors: Mapping[str, Tensor]) -> list[Want]:
        return [
            want
            for name, tensor in tensors.items()
            for want in _wants(
                _exchange_title(replica, state, name, tensor, standing), standing.layout(name, tensor), tensor
            )
        ]

    complete, own = True, list[Want]()
    for state, (tensors, on_resize) in states.items():
        there = {
            name: each
            for name, each in tensors.items()
            if all(want.name in saved for want in wants(0, state, {name: each}))
        }
        complete = complete and len(there) == len(tensors)
        before = {name: replicas[f"{state}.{name}"] for name in there}
        resized = {name: each for name, each in there.items() if before[name] != standing.of(name).size}
        for name in there.keys() - resized.keys():
            own += wants(standing.of(name).rank, state, {name: there[name]})
        totals = {name: torch.zeros_like(each) for name, each in resized.items()}
        for replica in range(max((before[name] for name in resized), default=0)):
            # one by one, so that memory holds one replica's state at a time
            theirs = {name: torch.empty_like(each) for name, each in resized.items() if replica < before[name]}
            load(path, wants(replica, state, theirs))
            for name, each in theirs.items():
                totals[name] += each
        for name, each in resized.items():
            each.copy_(totals[name] / {"split": standing.of(name).size, "whole": 1, "mean": before[name]}[on_resize])
    load(path, own)
    return complete


def _replicas(saved: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the number of replicas that have written each state of each parameter, by "state.parameter"."""
    found: dict[str, int] = {}
    for title in saved:
        if title.startswith("exchange."):
            _, number, rest = title.split(".", 2)
            name = rest.partition("@")[0]
            found[name] = max(found.get(name, 0), int(number) + 1)
    return found


def _wants(title: str, layout: Layout, into: Tensor, start: int = 0) -> list[Want]:
    """Returns the wants that fill `into`: the elements from `start` on of this rank's part of the global tensor
    `title`."""
    if into.is_contiguous():
        return [Want(title, layout.shape, box, part) for box, part in layout.boxes(start, into.view(-1))]
    assert layout.own_shape == layout.shape == tuple(into.shape), (
        f"{title} is read in parts into a tensor that is not contiguous"
    )
    return [Want(title, layout.shape, Box.whole(layout.shape), into)]


def _model(chunks: Sequence[Chunk]) -> Iterator[Titled]:
    return ((f"model.{slot.name}", slot.name, slot.view(chunk.master)) for chunk in chunks for slot in chunk.slots)


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _canonical(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _empty_states(
    saved: Mapping[str, tuple[int, ...]],
    optimizer: ChunkOptimizer,
    standing: Standing,
    own: str,
    names: Collection[str],
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
                if shape == standing.layouts[name].shape:
                    empty = torch.zeros(slot.shape, dtype=parameter.dtype, device=parameter.device)
                else:
                    empty = torch.zeros(shape)
                states.setdefault(name, {})[key[len(prefix) :]] = empty
    return states


def _put_back(optimizer: ChunkOptimizer, states: Mapping[str, dict[str, Tensor]], extra: Mapping[str, Any]) -> None:
    """Hands the state to the optimizer through its own `load_state_dict`, which knows where each key belongs."""
    saved = {name: group for group in extra["groups"] for name in group["members"]}
    names = {id(parameter): name for name, parameter in optimizer.known.items()}
    current = optimizer.torch.state_dict()
    state: dict[int, dict[str, Any]] = {}
    described = zip(
        optimizer.torch.param_groups, current["param_groups"], optimizer.members, optimizer.given, strict=True
    )
    for group, packed, members, given in described:
        packed.update(deepcopy(given))
        if members[0] in saved:
            packed.update(options_to_go_on(packed, saved[members[0]], given))
        for parameter, index in zip(group["params"], packed["params"], strict=True):
            name = names[id(parameter)]
            values = {**states.get(name, {}), **extra["optim"].get(name, {})}
            if values:
                state[index] = values
    optimizer.torch.load_state_dict({"state": state, "param_groups": current["param_groups"]})

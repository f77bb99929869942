"""What a rank sends its buddy: its state of one step, and of each step since then what its update was made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.buddy.room import Room, Shape
from shoal.checkpoint.optimizer_state import optimizer_extra
from shoal.checkpoint.role import WriterRole
from shoal.checkpoint.state import buffers
from shoal.chunks import Chunk, ChunkSpec
from shoal.comm import Group
from shoal.comm.wire import sent
from shoal.device import is_accelerator
from shoal.optim.groups import CHOICES
from shoal.optim.optimizer import ChunkOptimizer
from shoal.parallel.layout import Box, Layout, intersect, subtract


@dataclass(frozen=True)
class Mine:
    """What training changes on this rank. `chunks`: all of them, which may be others after the first step."""

    module: nn.Module
    chunks: Sequence[Chunk]
    optimizer: ChunkOptimizer
    role: WriterRole


@sent
@dataclass(frozen=True)
class About:
    """Describes the tensors of a snapshot, which is the same for most of them.

    - `chunks`: those that are trained, and `frozen` ones, each as if what the rank owns of it were all of it
    - `on_host`: the chunks that the host updates, by index
    - `names`: of the parameters, in the order of the model; `layouts`: of each
    - `states`: (parameter, key, dtype, shape) of each tensor of the optimizer's state
    """

    chunks: list[ChunkSpec]
    frozen: list[ChunkSpec]
    on_host: list[int]
    names: list[str]
    layouts: dict[str, Layout]
    states: list[tuple[str, str, torch.dtype, torch.Size]]

    @property
    def shapes(self) -> list[Shape]:
        """Shapes and dtypes of the tensors that are sent, without frozen chunks."""
        masters = [(torch.Size([spec.size]), spec.master_dtype) for spec in self.chunks]
        return masters + [(shape, dtype) for _, _, dtype, shape in self.states]

    @property
    def shapes_of_frozen(self) -> list[Shape]:
        """Shapes and dtypes of the frozen chunks."""
        return [(torch.Size([spec.size]), spec.dtype) for spec in self.frozen]

    @property
    def shapes_of_gradients(self) -> list[Shape]:
        """Shapes and dtypes of the gradients that are sent in each step."""
        return [(torch.Size([spec.size]), spec.grad_dtype) for spec in self.chunks]


@sent
@dataclass(frozen=True)
class Rest:
    """What goes beside the tensors of a snapshot: the rest of the `optimizer`'s state, as in a checkpoint, and
    `buffers` by their names in a checkpoint."""

    optimizer: dict[str, Any]
    buffers: dict[str, Tensor]


@sent
@dataclass(frozen=True)
class Facts:
    """What a rank knows of its update before the vote: the options of each optimizer group, the parameters that its
    backward has not reached, and the buffers that its forwards have left."""

    options: list[dict[str, Any]]
    untouched: list[str]
    buffers: dict[str, Tensor]


@dataclass
class Snapshot:
    """State of another rank before `step`, with what its updates were made with since then, by step.

    - `room`: masters of each chunk, then the optimizer's state, as `about` says
    - `frozen`: the frozen chunks, which every snapshot of the same chunks has in common
    - `log`: the rank's facts, and the gradients of the chunks
    """

    step: int
    about: About
    rest: Rest
    room: Room
    frozen: Room
    log: dict[int, tuple[Facts, Room]] = field(default_factory=dict)

    @property
    def rooms(self) -> list[Room]:
        """All that it takes."""
        return [self.room, self.frozen, *self.rooms_of_log]

    @property
    def rooms_of_log(self) -> list[Room]:
        return [room for _, room in self.log.values()]


@dataclass(frozen=True)
class Alone:
    """What only this rank has: `chunks` of which no other rank holds all, `frozen` ones among them, and names of
    `buffers`."""

    chunks: Sequence[Chunk]
    frozen: Sequence[Chunk]
    buffers: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.chunks or self.frozen or self.buffers)


def alone(mine: Mine, everyone: Group) -> Alone:
    """Finds what only this rank has. Collective over `everyone`."""
    chunks = [chunk for chunk in mine.chunks if chunk.owned.slots]
    held = [[(f"model.{slot.name}", _boxes(mine.role, slot)) for slot in chunk.owned.slots] for chunk in chunks]
    kept = [title for title, _ in buffers(mine.module) if title not in mine.role.silent]
    elsewhere: dict[str, list[Box]] = {}
    for place, theirs in enumerate(everyone.all_gather_object([[each for slots in held for each in slots], kept])):
        if place != everyone.rank:
            for name, boxes in theirs[0]:
                elsewhere.setdefault(name, []).extend(boxes)
            elsewhere.update((title, []) for title in theirs[1])
    only = [chunk for chunk, slots in zip(chunks, held, strict=True) if any(_left(*each, elsewhere) for each in slots)]
    trained, frozen = ([chunk for chunk in only if chunk.trainable is wanted] for wanted in (True, False))
    return Alone(trained, frozen, [title for title in kept if title not in elsewhere])


def taken(mine: Mine, alone: Alone) -> tuple[About, Rest, list[Tensor]]:
    """Returns what this rank sends of its state, not to be changed. Masters that rest are opened: `rest` of the chunks
    closes them."""
    optimizer = mine.optimizer
    names = {slot.name for chunk in alone.chunks for slot in chunk.owned.slots}
    everything = names | {slot.name for chunk in alone.frozen for slot in chunk.owned.slots}
    states = {at: value for at, value in optimizer.state_tensors().items() if at[0] in names}
    about = About(
        [_as_whole(chunk) for chunk in alone.chunks],
        [_as_whole(chunk) for chunk in alone.frozen],
        [chunk.index for chunk in alone.chunks if not is_accelerator(_device(chunk, optimizer))],
        [name for name in optimizer.known if name in names],
        {name: layout for name, layout in mine.role.layouts.items() if name in everything},
        [(*at, value.dtype, value.shape) for at, value in states.items()],
    )
    rest = Rest(optimizer_extra(optimizer, None), _buffers(mine.module, alone))
    return about, rest, [*(chunk.owned.master_to_read for chunk in alone.chunks), *states.values()]


def facts(mine: Mine, alone: Alone, touched: Mapping[str, bool]) -> Facts:
    """Returns what this rank knows of the update that comes. `touched`: whether its backward has reached each
    parameter."""
    groups = mine.optimizer.torch.param_groups
    options = [{key: value for key, value in each.items() if key not in ("params", *CHOICES)} for each in groups]
    return Facts(options, [name for name, seen in touched.items() if not seen], _buffers(mine.module, alone))


def _buffers(module: nn.Module, alone: Alone) -> dict[str, Tensor]:
    return {title: buffer.detach() for title, buffer in buffers(module) if title in alone.buffers}


def _boxes(role: WriterRole, slot: Any) -> list[Box]:
    nothing = torch.empty(slot.numel, device="meta")
    return [box for box, _ in role.layouts[slot.name].boxes(slot.start, nothing)]


def _left(name: str, boxes: Sequence[Box], elsewhere: Mapping[str, Sequence[Box]]) -> list[Box]:
    """Returns what no other rank has of `boxes`."""
    left = [box for box in boxes if box.numel]
    for theirs in elsewhere.get(name, ()):
        left = [part for box in left for part in _without(box, intersect(box, theirs))]
    return left


def _without(box: Box, common: Box | None) -> list[Box]:
    return [box] if common is None else subtract(box, common)


def _as_whole(chunk: Chunk) -> ChunkSpec:
    owned, spec = chunk.owned, chunk.spec
    grad_dtype = owned.gradient.dtype if chunk.trainable else spec.grad_dtype
    return replace(spec, slots=owned.slots, size=owned.size, grad_dtype=grad_dtype)


def _device(chunk: Chunk, optimizer: ChunkOptimizer) -> torch.device:
    return optimizer.known[chunk.owned.slots[0].name].device

"""A parameter of a job's model that is served by rows: its gradients come with those of the weights, in one push, and
an update of the weights is one of its rows, too.

Each server writes its rows by itself, in checkpoints of its own; `gather` makes of all of them the checkpoint of a run,
in which the parameter is a tensor like any other.

    server/0/rows/emb.weight/step-...   rows [here, width], optim.sum [here, width], count.step
    checkpoints/step-...                model.emb.weight [rows, width], optim.emb.weight.sum, optim.emb.weight.step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.dcp import Stored
from shoal.checkpoint.directory import step_path
from shoal.checkpoint.merge import Move, merge
from shoal.checkpoint.pieces import Piece, Want
from shoal.checkpoint.reader import load, tensor_shapes
from shoal.checkpoint.writer import Writer
from shoal.chunks.exact import exact_sum
from shoal.comm import World
from shoal.comm.reductions import finish
from shoal.device import CPU, is_accelerator
from shoal.elastic.records import Malformed
from shoal.optim.fused.optimizer import OptimizerFactory
from shoal.parallel.layout import Box
from shoal.server.row_store import RowStore
from shoal.server.sessions import Form, same_kind
from shoal.server.shares import Rows, Share
from shoal.server.sharing import KEPT
from shoal.server.table import memory_of_numbers, memory_of_rows, not_finite, not_here, not_once, summed

BLOCKS = 512
"""Blocks of neighbouring rows into which a table is cut, at most: each is a box in a checkpoint."""
FOLDER = "rows"
_READ_AT_ONCE = 1 << 22  # numbers

Pushed = tuple[Tensor, Tensor]
"""The numbers of rows, each once and in ascending order, and their gradients [n, width]."""


class ServedTable:
    """The rows that the server `share` has, on `device`, of the parameter `name`, whose first values are `whole` [rows,
    width].

    optimizer: leaves a row alone whose gradient is zero (see optim.groups.moves_untouched).
    """

    def __init__(
        self, name: str, whole: Tensor, optimizer: OptimizerFactory, share: Share, device: torch.device = CPU
    ) -> None:
        self.name, self._share, self.device = name, share, device
        (rows, self._width), self._dtype = whole.shape, whole.dtype
        self.places = Rows(rows, share.count, -(-rows // BLOCKS))
        values = whole.new_zeros(self.places.size(share.index), self._width, device=device)
        for index, first, length in self.places.stretches(share.index):
            values[index : index + length] = whole[first : first + length]
        self._store = RowStore(values, optimizer)
        self._rows, self._mean = torch.empty(0, dtype=torch.int64), values[:0]

    @property
    def numel(self) -> int:
        """How many numbers of the parameter are here."""
        return sum(length for *_, length in self.places.stretches(self._share.index)) * self._width

    def to_json(self) -> dict[str, object]:
        """Describes the table for clients."""
        about = {"rows": self.places.count, "width": self._width, "block": self.places.block, "here": self.numel}
        return {**about, "dtype": str(self._dtype).removeprefix("torch."), "joined": True}

    def room(self, forms: Sequence[Form]) -> list[Tensor]:
        """Returns memory for the gradients of some rows. Raises Malformed where `forms` are none."""
        count = forms[0].numel
        if not same_kind(forms, [Form(torch.int64, count), Form(self._dtype, count * self._width)]):
            raise Malformed(f"{list(forms)[:3]}, which are no rows of {self._width} and their gradients")
        return memory_of_rows(forms, self.places.count, self.device)

    def decoded(self, raw: Sequence[Tensor]) -> Pushed:
        """Returns rows, on the CPU, and their gradients."""
        return raw[0].view(torch.int64), raw[1].to(self.device).view(self._dtype).view(-1, self._width)

    def problem(self, pushed: Pushed) -> str:
        """Returns why no update can be made of these gradients, or ""."""
        rows, values = pushed
        if why := not_once(rows) or not_here(rows, self.places, self._share.index):
            return f"{self.name}: {why}"
        return not_finite(values)

    @torch.no_grad()
    def mean(self, pushes: Sequence[Pushed], counts: Sequence[float]) -> None:
        """Computes the mean of gradients, weighted by `counts`, in which a row that one has not counts as zero. Of
        equal counts it has the bits of the same sum of whole gradients."""
        rows = torch.cat([each for each, _ in pushes]).to(self.device)
        if len(set(counts)) == 1:
            self._rows, total = summed(rows, torch.cat([each for _, each in pushes]))
            self._mean = finish(total, "avg", len(pushes))
        else:
            weighted = [values * count for (_, values), count in zip(pushes, counts, strict=True)]
            self._rows, total = summed(rows, torch.cat(weighted))
            self._mean = total.div_(sum(counts))

    def squares(self) -> Tensor:
        """Returns the squared norm of the mean, as an exact sum of those of its rows (see chunks.exact): the same bits
        however rows are shared among servers."""
        return exact_sum(torch.linalg.vector_norm(self._mean, dim=1).double().square())

    def apply(self, factor: Tensor, rate: float) -> None:
        """Updates with `factor` (0-dim) times the mean that was computed, at a learning rate."""
        if not len(self._rows):
            return
        for group in self._store.optimizer.param_groups:
            group["lr"] = rate
        _, index = self.places.place(self._rows)
        self._store.step(index, self._mean if float(factor) == 1.0 else self._mean.mul_(factor))

    def asked(self, forms: Sequence[Form]) -> list[Tensor]:
        """Returns memory for the numbers of rows that are asked for. Raises Malformed where `forms` are none."""
        return memory_of_numbers(forms, self.places.count, self.device)

    def wrong(self, rows: Tensor) -> str:
        """Returns why these rows cannot be read, or ""."""
        return not_here(rows, self.places, self._share.index)

    def read(self, rows: Tensor) -> Tensor:
        """Returns the values of rows."""
        _, index = self.places.place(rows)
        return self._store.at(index)

    def save(self, folder: Path, step: int, group: Mapping[str, Any]) -> None:
        """Writes a checkpoint of these rows into `folder`. `group`: the options of the optimizer, as a checkpoint has
        them."""
        pieces = [piece for name, each in self._store.tensors.items() for piece in self._pieces(name, each)]
        for key, value in self._store.counters.items():
            pieces.append(Piece(f"count.{key}", (), Box((), ()), torch.as_tensor(value)))
        groups = [{**group, "members": [self.name]}] if self._share.index == 0 else []
        writer = Writer(folder / FOLDER / self.name, World.single(), KEPT)
        writer.save(step, pieces, {"groups": groups, "optim": {}}, wait=True, copy=is_accelerator(self.device))
        writer.close()

    def _pieces(self, name: str, tensor: Tensor) -> list[Piece]:
        """Returns the blocks of a tensor of these rows, and what lies behind a short one, as pieces of their own."""
        found = []
        for index, _, length in self.places.stretches(self._share.index):
            for start, size in ((index, length), (index + length, self.places.block - length)):
                if size:
                    box = Box((start, 0), (size, self._width))
                    found.append(Piece(name, tuple(tensor.shape), box, tensor[start : start + size]))
        return found

    def load_own(self, folder: Path, step: int) -> None:
        """Reads what `save` wrote. Raises CheckpointError."""
        path = step_path(folder / FOLDER / self.name, step)
        load(path, [Want.whole(name, each) for name, each in self._store.tensors.items() if len(each)])
        self._load_counters(path, "count")

    def load(self, path: Path) -> None:
        """Reads these rows from the checkpoint of a run, whoever wrote it, and the optimizer's state where it has all
        that this one needs. Raises CheckpointError."""
        store, shapes = self._store, tensor_shapes(path)
        into = {f"model.{self.name}": store.values}
        state = {f"optim.{self.name}.{key}": each for key, each in store.state.items()}
        counters = {f"optim.{self.name}.{key}" for key in store.counters}
        if state.keys() | counters <= shapes.keys():
            into.update(state)
            self._load_counters(path, f"optim.{self.name}")
        rows = max(1, _READ_AT_ONCE // self._width)
        for start in range(0, self.places.count, rows):
            ids = torch.arange(start, min(start + rows, self.places.count))
            server, index = self.places.place(ids)
            here, box = server == self._share.index, Box((start, 0), (len(ids), self._width))
            found = {name: self._store.values.new_empty(box.sizes) for name in into}
            shape = (self.places.count, self._width)
            load(path, [Want(name, shape, box, each) for name, each in found.items()])
            for name, values in found.items():
                into[name][index[here].to(self.device)] = values[here.to(self.device)]

    def _load_counters(self, path: Path, before: str) -> None:
        found = {key: torch.zeros_like(torch.as_tensor(value)) for key, value in self._store.counters.items()}
        load(path, [Want(f"{before}.{key}", (), Box((), ()), each) for key, each in found.items()])
        self._store.count_on(found)

    def to_whole(self, server: int, stored: Stored) -> Stored | None:
        """Returns what `server` has written as a part of the whole parameter; None for what is none."""
        kind, _, key = stored.name.partition(".")
        if kind == "count":
            return replace(stored, name=f"optim.{self.name}.{key}") if server == 0 else None
        (start, column), name = stored.box.offsets, f"model.{self.name}" if kind == "rows" else ""
        row = self.places.row(server, start)
        if row >= self.places.count:
            return None
        box, shape = Box((row, column), stored.box.sizes), (self.places.count, self._width)
        return replace(stored, name=name or f"optim.{self.name}.{key}", box=box, shape=shape)


def gather(tables: Sequence[ServedTable], parts: Sequence[Path], step: int, directory: Path, keep: int) -> None:
    """Makes one checkpoint in `directory` of what all servers have written of a step, each into its folder in `parts`.
    `keep`: how many are kept there. Raises CheckpointError."""
    paths: list[Path] = [step_path(part, step) for part in parts]
    moves: list[Move | None] = [None] * len(parts)
    for table in tables:
        for server, part in enumerate(parts):
            paths.append(step_path(part / FOLDER / table.name, step))
            moves.append(partial(table.to_whole, server))
    merge(paths, step_path(directory, step), keep, moves)

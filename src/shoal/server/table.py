"""Rows of a table, such as an embedding's: pulled and updated one by one, so that it may be larger than what a worker
has room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.manifest import read_manifest
from shoal.checkpoint.pieces import Piece, Want
from shoal.checkpoint.reader import load, newest, tensor_shapes
from shoal.checkpoint.writer import Writer
from shoal.comm import World
from shoal.device import CPU, is_accelerator, to_device
from shoal.elastic.records import Malformed
from shoal.errors import CheckpointError, UserError
from shoal.optim.fused.optimizer import OptimizerFactory
from shoal.parallel.layout import Box
from shoal.server.ledger import Gradient, Update
from shoal.server.row_store import RowStore
from shoal.server.scaled import at_rate
from shoal.server.sessions import Form, memory, same_kind
from shoal.server.shares import Rows, Share
from shoal.server.sharing import KEPT

_FILLED_AT_ONCE = 1 << 20  # rows


@dataclass(frozen=True)
class Table:
    """`rows` rows of `width` numbers.

    fill: returns the first values of the rows that it is given (int64), as [rows, width]; None for zeros.
    on_host: keep rows and the optimizer's state of them in the host's memory, also where the server has an accelerator.
    """

    rows: int
    width: int
    fill: Callable[[Tensor], Tensor] | None = None
    on_host: bool = False

    def __post_init__(self) -> None:
        if any(type(each) is not int or each < 1 for each in (self.rows, self.width)):
            raise UserError(f"Table({self.rows}, {self.width}): give numbers of rows and of columns from 1 on")

    @classmethod
    def of(cls, weight: Tensor) -> Table:
        """Makes the table of a matrix's rows."""
        if weight.dim() != 2:
            raise UserError(f"a tensor of shape {tuple(weight.shape)} is no table: give one of [rows, width]")
        return cls(len(weight), weight.shape[1], lambda rows: weight.detach()[rows])


class TableRows:
    """The rows of `table` that the server `share` has, fp32 on `device`, under `optimizer` (see RowStore)."""

    def __init__(self, table: Table, optimizer: OptimizerFactory, share: Share, device: torch.device = CPU) -> None:
        self._table, self._share = table, share
        self.device = CPU if table.on_host else device
        self._beside = device  # where gradients come from an accelerator
        self._rows = Rows(table.rows, share.count)
        values = torch.zeros(self._rows.size(share.index), table.width, device=self.device)
        for start in range(0, len(values) if table.fill else 0, _FILLED_AT_ONCE):
            assert table.fill is not None
            some = slice(start, start + _FILLED_AT_ONCE)
            values[some] = table.fill(self._rows.of(share.index, some)).to(self.device)
        self._store = RowStore(values, optimizer)

    def room(self, forms: Sequence[Form]) -> list[Tensor]:
        """Returns memory for the gradients of some rows. Raises Malformed where `forms` are none."""
        count = forms[0].numel if forms else 0
        wanted = [Form(torch.int64, count), Form(torch.float32, count * self._table.width)]
        if not same_kind(forms, wanted):
            raise Malformed(f"{list(forms)[:3]}, which are no rows of {self._table.width} and their gradients")
        return memory_of_rows(forms, self._table.rows, self._beside)

    def decoded(self, raw: Sequence[Tensor]) -> list[Tensor]:
        """Returns rows, on the CPU, and their gradients."""
        gradients = raw[1].to(self.device).view(torch.float32)
        return [raw[0].view(torch.int64), gradients.view(-1, self._table.width)]

    def problem(self, gradients: Sequence[Tensor]) -> str:
        """Returns why no update can be made of these gradients, or ""."""
        rows, values = gradients
        if why := not_once(rows) or self._not_here(rows):
            return why
        return not_finite(values)

    @torch.no_grad()
    def update(self, update: Update) -> None:
        """Updates the rows that have gradients with their mean over all pushes, in which others count as zero."""
        parts = [each.tensors for each in update.gradients]
        rows, total = parts[0]
        if len(parts) > 1:
            all_rows, gradients = map(torch.cat, zip(*parts, strict=True))
            rows, total = summed(all_rows.to(self.device), gradients)
        if not len(rows):
            return
        _, index = self._rows.place(rows)
        with at_rate(self._store.optimizer, update.weight):
            self._store.step(index, total / len(parts) if len(parts) > 1 else total)

    def dropped(self, push: Gradient) -> None:
        """Does nothing: a push that no update is made of is nowhere else."""

    def asked(self, forms: Sequence[Form]) -> list[Tensor]:
        """Returns memory for the numbers of rows that are asked for. Raises Malformed where `forms` are none."""
        return memory_of_numbers(forms, self._table.rows, self._beside)

    def read(self, asked: Sequence[Tensor], into: list[Tensor], device: torch.device) -> list[Tensor]:
        """Returns the values of rows, whose numbers have been found right; on `device`, if that is an accelerator."""
        _, index = self._rows.place(asked[0])
        found = self._store.at(index)
        return [to_device(found, device) if is_accelerator(device) else found]

    def wrong(self, asked: Sequence[Tensor]) -> str:
        """Returns why these rows cannot be read, or ""."""
        return self._not_here(asked[0])

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint of these rows."""
        store = self._store
        plain = {key: value for key, value in store.counters.items() if not isinstance(value, Tensor)}
        counts = {f"count.{key}": value for key, value in store.counters.items() if isinstance(value, Tensor)}
        pieces = [Piece.whole(name, each) for name, each in (store.tensors | counts).items()]
        about = {**extra, "count": plain, "table": [self._table.rows, self._table.width], "share": self._index()}
        writer = Writer(directory, World.single(), KEPT)
        on_device = is_accelerator(self.device)
        writer.save(int(extra["server"]["version"]), pieces, about, wait=True, copy=on_device)
        writer.close()

    def load(self, directory: Path) -> dict[str, Any]:
        """Reads the newest checkpoint; returns its `extra`. Raises CheckpointError where there is none of these
        rows."""
        path = newest(directory, lambda bad, why: None)
        if path is None:
            raise CheckpointError(f"no checkpoint to load in {directory}")
        counters: dict[str, Any] = {}
        into = {"rows": self._store.values}
        for name, shape in tensor_shapes(path).items():
            kind, _, key = name.partition(".")
            if kind != "rows":
                place = self.device if kind == "optim" else self._store.counts_on
                into[name] = torch.zeros(shape, device=place)
                (self._store.state if kind == "optim" else counters)[key] = into[name]
        extra = load(path, [Want.whole(name, each) for name, each in into.items()])
        if extra["table"] != [self._table.rows, self._table.width] or extra["share"] != self._index():
            raise CheckpointError(f"{path} holds rows of another table, or of another server's share")
        self._store.count_on({**counters, **extra["count"]})
        return extra

    def load_parts(self, parts: Sequence[Path]) -> dict[str, Any]:
        """Reads this server's rows from the checkpoints of other servers, however many; returns the `extra` of the
        first."""
        extras = [self._load_share(path, index, len(parts)) for index, path in enumerate(parts)]
        self._store.count_on(extras[0]["count"])
        return extras[0]

    def _load_share(self, path: Path, index: int, count: int) -> dict[str, Any]:
        """Reads what is here of the rows that server `index` of `count` had."""
        extra, rows, store = dict(read_manifest(path).extra), Rows(self._table.rows, count), self._store
        if extra["table"] != [self._table.rows, self._table.width] or extra["share"] != [index, count]:
            raise CheckpointError(f"{path} holds rows of another table, or of another server's share")
        shapes = tensor_shapes(path)
        counting = {name: shape for name, shape in shapes.items() if name.startswith("count.")}
        counters = {name: torch.zeros(shape, device=self._store.counts_on) for name, shape in counting.items()}
        load(path, [Want.whole(name, each) for name, each in counters.items()])
        store.count_on({name.removeprefix("count."): value for name, value in counters.items()})
        for key in (name.removeprefix("optim.") for name in shapes if name.startswith("optim.")):
            store.state.setdefault(key, torch.zeros_like(store.values))
        into = store.tensors
        for start in range(0, rows.size(index), _FILLED_AT_ONCE):
            ids = rows.of(index, slice(start, start + _FILLED_AT_ONCE))
            server, place = self._rows.place(ids)
            mine, box = server == self._share.index, Box((start, 0), (len(ids), self._table.width))
            found = {name: torch.empty(box.sizes) for name in into if name in shapes}
            load(path, [Want(name, shapes[name], box, each) for name, each in found.items()])
            for name, values in found.items():
                into[name][place[mine].to(self.device)] = values[mine].to(self.device)
        return extra

    def to_json(self) -> dict[str, object]:
        """Describes the table for clients."""
        return {"rows": self._table.rows, "width": self._table.width, "share": self._index()}

    def close(self) -> None:
        """Does nothing: rows are memory alone."""

    def _index(self) -> list[int]:
        return [self._share.index, self._share.count]

    def _not_here(self, rows: Tensor) -> str:
        return not_here(rows, self._rows, self._share.index)


def memory_of_rows(forms: Sequence[Form], count: int, device: torch.device) -> list[Tensor]:
    """Returns memory for the numbers of rows of a table of `count`, on the CPU, where they are looked at, and for their
    gradients, if there are any, on the accelerator `device` where they come from one. Raises Malformed for more."""
    numbers, *gradients = forms
    if numbers.numel > count:
        raise Malformed(f"{numbers.numel:,} rows of a table of {count:,}")
    return [torch.empty(numbers.numel, dtype=numbers.dtype), *memory(gradients, device)]


def memory_of_numbers(forms: Sequence[Form], count: int, device: torch.device) -> list[Tensor]:
    """Returns memory for the numbers of rows that are asked for. Raises Malformed where `forms` are none."""
    if len(forms) != 1 or forms[0].dtype is not torch.int64:
        raise Malformed(f"{list(forms)[:3]}, which are no numbers of rows")
    return memory_of_rows(forms, count, device)


def not_here(rows: Tensor, places: Rows, server: int) -> str:
    """Returns why `server` has not all of these rows, or ""."""
    if not len(rows):
        return ""
    if int(rows.min()) < 0 or int(rows.max()) >= places.count:
        return f"rows {int(rows.min())} to {int(rows.max())} of a table of {places.count:,}"
    return "rows of another server" if bool((places.place(rows)[0] != server).any()) else ""


def not_finite(gradients: Tensor) -> str:
    """Returns why no update can be made of these gradients, or "". The least and the largest are NaN where one of them
    is; finding them takes a twentieth of the time of the maximum norm."""
    finite = not len(gradients) or all(map(torch.isfinite, torch.aminmax(gradients)))
    return "" if finite else "a gradient that is not finite"


def not_once(rows: Tensor) -> str:
    """Returns why a push has not each of its rows once, or ""."""
    ascend = not len(rows) or bool((rows[1:] > rows[:-1]).all())
    return "" if ascend else "rows that are not each there once, in ascending order"


@torch.no_grad()
def summed(rows: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each of `rows` once, in ascending order, with the sum of its gradients, added in the order given."""
    once, place = torch.unique(rows, return_inverse=True)
    total = gradients.new_zeros(len(once), gradients.shape[1])
    if is_accelerator(gradients.device):  # where index_add_ adds in any order, and this sorts
        return once, total.index_put_((place,), gradients, accumulate=True)
    return once, total.index_add_(0, place, gradients)

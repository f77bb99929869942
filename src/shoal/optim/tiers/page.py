"""Masters and optimizer state of one chunk as they lie on a disk, or on the host, between updates.

    | masters, where they lie beside the data | exp_avg | exp_avg_sq | ...    an update reads and writes: `moving` bytes
    | weights that the host keeps anyway, so that the file alone says all |    written too where generations are kept

While a page is away its tensors show NaN. It is also the store of the chunk's masters (see chunks.masters): whoever
asks for those beside an update gets them in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from shoal.chunks.masters import WholeMasters, round_into
from shoal.optim.tiers.disk import sectors, wait

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal.chunks import Buffer, Slot


class File(Protocol):
    """Storage of a page: a file, or memory of the host. Futures end when bytes have come or gone."""

    def read(self, into: Tensor) -> list[Future[None]]: ...
    def write(self, data: Tensor) -> list[Future[None]]: ...
    def sync(self) -> None: ...
    def mapped(self) -> Tensor: ...


LINE = 64
"""Bytes: tensors in a page begin at multiples of it."""


def parts(chunk: Buffer, keys: Sequence[str]) -> tuple[dict[str, int], int]:
    """Lays out a page of the owned `chunk`: where masters, if a page holds them, and state under each of `keys` begin;
    and the bytes of all of them."""
    names = [*(["master"] if has_master(chunk) else []), *keys]
    each = -(-chunk.size * chunk.master_like.dtype.itemsize // LINE) * LINE
    return {name: number * each for number, name in enumerate(names)}, sectors(each * len(names))


def mirrored(chunk: Buffer) -> list[Tensor]:
    """Tensors of the owned `chunk` that the host keeps from update to update, and a page alone does not say."""
    if has_master(chunk):
        return []  # the weights follow from the masters
    return [each for each in (chunk.data, chunk.rest_of_masters) if each is not None]


def has_master(chunk: Buffer) -> bool:
    """Whether a page holds masters of the owned `chunk`: where they are kept as they are, beside the data."""
    return isinstance(chunk.masters, WholeMasters)


class Page:
    """Holds the state of the owned `chunk` under `keys`, one value an element each, and its masters.

    - `mirrors`: whether what the host keeps is written too
    - `file()`: where its present content is read and written
    - `buffer(bytes)`: allocates memory for it while it is here, `first(bytes)` for what it begins with
    - `touch()`: called before it is written beside an update
    - `roles`: bytes of its file by role
    """

    def __init__(
        self,
        chunk: Buffer,
        keys: Sequence[str],
        mirrors: bool,
        file: Callable[[], File],
        buffer: Callable[[int], Tensor],
        first: Callable[[int], Tensor],
        touch: Callable[[], None],
    ) -> None:
        self.chunk, self._file, self._buffer, self._touch = chunk, file, buffer, touch
        self.values, self._size, self._dtype = chunk.master_like, chunk.size, chunk.master_like.dtype
        self.has_master = has_master(chunk)
        self._at, self.moving = parts(chunk, keys)
        self.mirrored = mirrored(chunk) if mirrors else []
        self.nbytes_whole = self.moving + sum(sectors(each.nbytes) for each in self.mirrored)
        self._nothing = torch.full((), float("nan"), dtype=self._dtype, device=buffer(0).device)
        masters = min((start for start in self._at.values() if start), default=self.moving) if self.has_master else 0
        mirrored_size = self.nbytes_whole - self.moving
        self.roles = {"masters": masters, "optimizer state": self.moving - masters, "weights": mirrored_size}
        self._states: Callable[[str], dict[str, Any]] = lambda name: {}
        self._parameters: Mapping[str, Tensor] = {}
        self._memory: Tensor | None = None  # where it is now
        self._own = False  # whether that is memory of its own
        self.on_disk = False
        if self.has_master:
            self.show(first(self.moving), own=True)
            chunk.masters = self

    def bind(self, parameters: Mapping[str, Tensor], states: Callable[[str], dict[str, Any]]) -> None:
        """Takes the parameters over the masters, and `states(name)`, the state of each."""
        self._parameters, self._states = parameters, states

    # as the store of the masters (see chunks.masters)

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def is_open(self) -> bool:
        return self._memory is not None

    def open(self, data: Tensor) -> None:
        """Brings it into memory of its own, unless it is there."""
        if self._memory is None:
            memory = self._buffer(self.moving)
            wait(self._file().read(memory))
            self.show(memory, own=True)

    @torch.no_grad()
    def close(self, data: Tensor, turn: int, is_cast: bool) -> None:
        """Rounds the masters into the data, unless that `is_cast` already; what is in memory of its own goes back to
        the disk."""
        if not is_cast and self.is_open:
            round_into(data, self.values)
        if self._own:
            self.put_away()

    # where it is

    def _slots(self) -> Iterator[tuple[Slot, str, Tensor]]:
        """Yields slot, key and value of each state with one value an element."""
        for slot in self.chunk.slots:
            for key, value in self._states(slot.name).items():
                like = isinstance(value, Tensor) and (value.shape, value.dtype) == (slot.shape, self._dtype)
                if key in self._at and like:
                    yield slot, key, value

    def flat(self, name: str, memory: Tensor) -> Tensor:
        """View of the part `name` ("master" or a key) of a page in `memory`: 1-D, of the chunk's size."""
        start = self._at[name]
        return memory[start : start + self._size * self._dtype.itemsize].view(self._dtype)

    @torch.no_grad()
    def show(self, memory: Tensor, own: bool = False) -> None:
        """Makes tensors views of `memory`, where its content is. State that was read from a checkpoint moves there."""
        self._memory, self._own = memory, own
        if self.has_master:
            flat = self.flat("master", memory)
            self.values.data = flat
            for slot in self.chunk.slots:
                if slot.name in self._parameters:
                    self._parameters[slot.name].data = slot.view(flat)
        for slot, key, value in self._slots():
            view = slot.view(self.flat(key, memory))
            if not self._is_away(value):
                view.copy_(value)
            value.data = view

    @torch.no_grad()
    def hide(self) -> Tensor:
        """Collects its content in the memory where it is, returns that for writing, and makes its tensors show NaN."""
        memory = self._memory
        assert memory is not None
        for slot, key, value in self._slots():
            view = slot.view(self.flat(key, memory))
            if value.data_ptr() != view.data_ptr():  # made, or bound anew, by the update
                view.copy_(value)
            value.data = self._nothing.expand(value.shape)
        if self.has_master:
            self.values.data = self._nothing.expand(self._size)
            for slot in self.chunk.slots:
                if slot.name in self._parameters:
                    self._parameters[slot.name].data = self._nothing.expand(slot.shape)
        self._memory, self._own = None, False
        for mine, place in self._mirrors(memory):
            place.copy_(mine)
        return memory

    def _mirrors(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the bytes of what the host keeps, each with its place in a whole page in `memory`."""
        start = self.moving
        for each in self.mirrored:
            yield each.view(torch.uint8), memory[start : start + each.nbytes]
            start += sectors(each.nbytes)

    def put_away(self) -> None:
        """Writes it, as it is, and frees its memory."""
        assert not self.mirrored or self._memory is None or self._memory.nbytes >= self.nbytes_whole
        self._touch()
        wait(self._file().write(self.hide()))
        self.on_disk = True

    @contextmanager
    def there(self) -> Iterator[None]:
        """Context in which it is in memory and may be changed, beside any update."""
        if self._memory is None:
            memory = self._buffer(self.nbytes_whole)
            if self.on_disk:
                wait(self._file().read(memory))
            self.show(memory, own=True)
        yield
        if self.is_open:
            self.put_away()

    def known(self) -> dict[str, list[str]]:
        """Keys of the state that it holds, by parameter."""
        found: dict[str, list[str]] = {}
        for slot, key, _ in self._slots():
            found.setdefault(slot.name, []).append(key)
        return found

    @torch.no_grad()
    def recall(self, known: Mapping[str, Sequence[str]]) -> None:
        """Takes over its file: what the host keeps, and for the state under the keys `known` that it is there."""
        memory = self._buffer(self.nbytes_whole)
        wait(self._file().read(memory))
        for slot in self.chunk.slots:
            for key in known.get(slot.name, ()):
                self._states(slot.name)[key] = self._nothing.expand(slot.shape)
        for mine, place in self._mirrors(memory):
            mine.copy_(place)
        self.show(memory)
        if self.has_master:
            round_into(self.chunk.data, self.values)
        self.hide()
        self.on_disk = True

    def _is_away(self, value: Tensor) -> bool:
        return value.untyped_storage()._cdata == self._nothing.untyped_storage()._cdata

    def seen(self) -> dict[tuple[str, str], Tensor]:
        """State of its parameters that is away, by (name, key), not to be changed: as it lies on the disk. What was
        loaded since is where the optimizer has it."""
        away = [(slot, key) for slot, key, value in self._slots() if self._is_away(value)]
        memory = self._lies_in() if away else self._nothing
        return {(slot.name, key): slot.view(self.flat(key, memory)) for slot, key in away}

    def read(self, data: Tensor) -> Tensor:
        """Masters where they lie, if need be on the disk."""
        return self.flat("master", self._lies_in())

    def _lies_in(self) -> Tensor:
        return self._memory if self._memory is not None else self._file().mapped()

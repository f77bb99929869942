"""How fp32 masters beside bf16 data are kept between updates, in less than their four bytes.

    whole        4 bytes: as they are
    split        2 bytes: what the data lacks to the exact fp32 value, the lower 16 bits. Nothing is lost
    kahan        2 bytes: the rest that rounding to bf16 left, in bf16: about 16 bits of mantissa
    stochastic   nothing: a master is rounded up or down to bf16 with a probability that makes its mean exact

An update opens them: they are fp32 in memory of their own, which closing gives back. Data is the master rounded to nearest, but for "stochastic".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.module.random import mix, name_key
from shoal.native import library


class Part(Protocol):
    """Where elements of a parameter lie: `numel` at `offset`, of its flat form those from `start` on."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def numel(self) -> int: ...


class MasterStore(Protocol):
    """Where the masters of a chunk are between updates, if not beside it in memory: a page of the disk or of the host.

    `open` brings them, `close` takes them away again: see `CompactMasters`, which has the same two.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of this chunk's memory that it takes while it is closed."""

    @property
    def lower_halves(self) -> Tensor | None:
        """What the data lacks to the fp32 values, where masters rest split."""

    @property
    def master(self) -> Tensor:
        """The masters for reading, where they lie: 1-D."""

    def open(self) -> None: ...
    def close(self, turn: int, is_cast: bool) -> None: ...


class CompactMasters:
    """Keeps `master` (fp32, 1-D) beside `data` (bf16, the same elements) as `how` says; they begin open. `slots` name the elements, so that what is
    drawn for one does not depend on how the model was cut."""

    def __init__(self, how: str, data: Tensor, master: Tensor, slots: Sequence[Part]) -> None:
        self._how, self._data, self._master, self._slots = how, data, master, slots
        dtype = {"split": torch.int16, "kahan": torch.bfloat16}.get(how)
        self.rest = None if dtype is None else torch.zeros(data.numel(), dtype=dtype, device=data.device)
        self._nbytes, self.is_open = master.nbytes, True

    @property
    def nbytes(self) -> int:
        """Bytes kept while it is closed."""
        return 0 if self.rest is None else self.rest.nbytes

    @property
    def lower_halves(self) -> Tensor | None:
        """What "split" keeps, while it is closed: whoever changes it changes the data too."""
        return self.rest if self._how == "split" and not self.is_open else None

    def move(self, data: Tensor) -> Tensor:
        """The same values of the data lie in `data` now, perhaps on another device, where the rest goes too; returns the master there."""
        self._data = data
        self.rest = self.rest.to(data.device) if self.rest is not None else None
        if data.device != self._master.device:
            assert not self.is_open
            self._master = torch.empty(data.numel(), dtype=self._master.dtype, device=data.device)
            self._master.untyped_storage().resize_(0)
        return self._master

    @torch.no_grad()
    def open(self) -> None:
        """Makes the fp32 values."""
        if self.is_open:
            return
        self._master.untyped_storage().resize_(self._nbytes)
        self.is_open = True
        if self._how == "split":
            assert self.rest is not None
            join_halves(self._data, self.rest, out=self._master)
        else:
            self._master.copy_(self._data)
            if self.rest is not None:
                self._master.add_(self.rest)

    @torch.no_grad()
    def close(self, turn: int, is_cast: bool = False) -> None:
        """Rounds the fp32 values into the data, unless it `is_cast` to nearest already, and gives their memory back. `turn`: of which update, for what is
        drawn."""
        if not self.is_open:
            return
        if self._how == "split":
            assert self.rest is not None
            part_halves(self._data, self.rest, self._master)
        elif self._how == "kahan":
            assert self.rest is not None
            if not is_cast:
                self._data.copy_(self._master)
            self.rest.copy_(self._master - self._data)
            kept = self._master.copy_(self._data).add_(self.rest)  # what opening will make of it
            self._data.copy_(kept)  # a rest of just half a step may count from the other side: saved and read, it would
            self.rest.copy_(kept - self._data)
        else:
            for slot in self._slots:
                stretch = slice(slot.offset, slot.offset + slot.numel)
                round_stochastically(self._data[stretch], self._master[stretch], name_key(f"{slot.name}@{turn}"), slot.start)
        self._master.untyped_storage().resize_(0)
        self.is_open = False


def join_halves(upper: Tensor, lower: Tensor, out: Tensor) -> None:
    """Makes `out` (fp32) of `upper` (bf16) and `lower` (int16), what it lacks; exactly what `part_halves` was given."""
    torch.add(upper.view(torch.int16).int() << 16, lower, out=out.view(torch.int32))


def part_halves(upper: Tensor, lower: Tensor, whole: Tensor) -> None:
    """Splits `whole` (fp32) into `upper` (bf16), rounded half up in magnitude, so that `lower` (int16), what it lacks, is within 16 bits."""
    bits = whole.view(torch.int32)
    rounded = (bits + 0x8000) >> 16
    upper.view(torch.int16).copy_(rounded)
    lower.copy_(bits - (rounded << 16))


def round_stochastically(data: Tensor, master: Tensor, key: int, start: int) -> None:
    """Rounds `master` (fp32) up or down into `data` (bf16), element i by 16 bits of mix(key ^ (start + i)) beside its lower half; what is not finite
    stays so."""
    kernels = library() if data.is_cpu and data.is_contiguous() and master.is_contiguous() else None
    if kernels is not None:
        pointers = ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(master.data_ptr())
        kernels.shoal_round_stochastically(*pointers, master.numel(), key, start)
        return
    place = torch.arange(start, start + master.numel(), device=data.device)
    draws = (mix(place ^ key) & 0xFFFF).int()
    bits = master.view(torch.int32)
    up = torch.where(master.isfinite(), bits + draws, bits)
    data.view(torch.int16).copy_(up >> 16)

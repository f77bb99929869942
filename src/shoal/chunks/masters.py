"""Stores of masters, the fp32 values beside bf16 data: how they are kept between updates, in less than four bytes.

    whole        4 bytes: as they are
    split        2 bytes: what the data lacks to the exact fp32 value, the lower 16 bits. Nothing is lost
    kahan        2 bytes: the rest that rounding to bf16 left, in bf16: about 16 bits of mantissa
    stochastic   nothing: a master is rounded up or down to bf16 with a probability that makes its mean exact

An update opens them: they are then fp32 in memory of their own, which closing gives back. Data are the masters rounded
to nearest, except for "stochastic".
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
    """Position of elements of a parameter: `numel` at `offset`; the first is element `start` of the flattened
    parameter."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def numel(self) -> int: ...


class MasterStore(Protocol):
    """Keeps the masters of a buffer between updates, if they are not its data.

    `data` is the buffer's, given to each call; `values` are the masters, 1-D, which may have no memory while they are
    closed. Here are the stores in memory; `optim.tiers.page.Page` is the one on a disk or in another tier.
    """

    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of this tier's memory that it takes while it is closed."""

    def open(self, data: Tensor) -> None:
        """Brings `values` into memory, where an update may change them."""

    def close(self, data: Tensor, turn: int, is_cast: bool) -> None:
        """Casts `values` into `data`, unless that `is_cast` to nearest already, and gives back what `open` took.

        `turn`: the step of the update, a key of stochastic rounding.
        """

    def read(self, data: Tensor) -> Tensor:
        """Masters, not to be changed, where they lie."""


def round_into(data: Tensor, values: Tensor) -> None:
    """Rounds `values` into `data`, of another dtype and perhaps on another device: where `values` are, so that half of
    the bytes cross, straight into pinned memory. torch's copy from a device that casts and waits does so on the host,
    in memory that is allocated anew and not pinned."""
    data.copy_(values if values.device == data.device else values.to(data.dtype))


class WholeMasters:
    """Masters kept in memory as they are."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def open(self, data: Tensor) -> None:
        """Does nothing: they are there."""

    def close(self, data: Tensor, turn: int, is_cast: bool) -> None:
        if not is_cast:
            round_into(data, self.values)

    def read(self, data: Tensor) -> Tensor:
        return self.values

    def to(self, device: torch.device) -> None:
        """Moves them."""
        self.values = self.values.to(device)


class CompactMasters:
    """Masters (fp32) kept beside bf16 data as `how` says; they begin open, in `values`.

    `slots` name the elements, so that random numbers do not depend on how the model was cut.
    """

    def __init__(self, how: str, values: Tensor, slots: Sequence[Part]) -> None:
        self._how, self.values, self._slots = how, values, slots
        dtype = {"split": torch.int16, "kahan": torch.bfloat16}.get(how)
        self.rest = None if dtype is None else torch.zeros(values.numel(), dtype=dtype, device=values.device)
        self._nbytes, self.is_open = values.nbytes, True

    @property
    def nbytes(self) -> int:
        return 0 if self.rest is None else self.rest.nbytes

    @property
    def lower_halves(self) -> Tensor | None:
        """`rest` of "split", while it is closed: whoever changes it changes the data too."""
        return self.rest if self._how == "split" and not self.is_open else None

    def to(self, device: torch.device) -> None:
        """Moves what is kept; they are closed."""
        self.rest = self.rest.to(device) if self.rest is not None else None
        if device != self.values.device:
            assert not self.is_open
            self.values = torch.empty(self.values.numel(), dtype=self.values.dtype, device=device)
            self.values.untyped_storage().resize_(0)

    @torch.no_grad()
    def open(self, data: Tensor) -> None:
        if self.is_open:
            return
        self.values.untyped_storage().resize_(self._nbytes)
        self.is_open = True
        if self._how == "split":
            assert self.rest is not None
            join_halves(data, self.rest, out=self.values)
        else:
            self.values.copy_(data)
            if self.rest is not None:
                self.values.add_(self.rest)

    @torch.no_grad()
    def close(self, data: Tensor, turn: int, is_cast: bool = False) -> None:
        if not self.is_open:
            return
        if self._how == "split":
            assert self.rest is not None
            part_halves(data, self.rest, self.values)
        elif self._how == "kahan":
            assert self.rest is not None
            if not is_cast:
                data.copy_(self.values)
            self.rest.copy_(self.values - data)
            kept = self.values.copy_(data).add_(self.rest)  # what opening will make of it
            data.copy_(kept)  # a rest of just half a step may count from the other side: saved and read, it would
            self.rest.copy_(kept - data)
        else:
            for slot in self._slots:
                stretch = slice(slot.offset, slot.offset + slot.numel)
                round_stochastically(data[stretch], self.values[stretch], name_key(f"{slot.name}@{turn}"), slot.start)
        self.values.untyped_storage().resize_(0)
        self.is_open = False

    def read(self, data: Tensor) -> Tensor:
        self.open(data)
        return self.values


def join_halves(upper: Tensor, lower: Tensor, out: Tensor) -> None:
    """Makes `out` (fp32) of `upper` (bf16) and `lower` (int16): exactly what `part_halves` was given."""
    torch.add(upper.view(torch.int16).int() << 16, lower, out=out.view(torch.int32))


def part_halves(upper: Tensor, lower: Tensor, whole: Tensor) -> None:
    """Splits `whole` (fp32) into `upper` (bf16) and `lower`, the int16 that it lacks to `whole`.

    `upper` is rounded half up in magnitude, so that `lower` is within 16 bits.
    """
    bits = whole.view(torch.int32)
    rounded = (bits + 0x8000) >> 16
    upper.view(torch.int16).copy_(rounded)
    lower.copy_(bits - (rounded << 16))


def round_stochastically(data: Tensor, master: Tensor, key: int, start: int) -> None:
    """Rounds `master` (fp32) up or down into `data` (bf16), at random: adds 16 bits of mix(key ^ (start + i)) to the
    lower half of element i, and cuts that off. Values that are not finite stay so."""
    kernels = library() if data.is_cpu and data.is_contiguous() and master.is_contiguous() else None
    if kernels is not None:
        pointers = ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(master.data_ptr())
        kernels.shoal_round_stochastically(*pointers, master.numel(), key, start)
        return
    position = torch.arange(start, start + master.numel(), device=data.device)
    draws = (mix(position ^ key) & 0xFFFF).int()
    bits = master.view(torch.int32)
    up = torch.where(master.isfinite(), bits + draws, bits)
    data.view(torch.int16).copy_(up >> 16)

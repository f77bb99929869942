"""Tensors on their way between two ranks, many of them in one message of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shoal.comm import Group
from shoal.comm.flat import as_bytes
from shoal.device import is_accelerator

PARCEL_BYTES = 4 * 2**20
"""Most bytes that a rank sends to another at once, and half of the memory that moving takes: little enough that caches
still hold a parcel when it is sent, or taken apart."""

ALIGNED = 16
"""Bytes; each tensor of a parcel starts at a multiple, so that a view of its dtype can be taken there."""


class Coming(Protocol):
    """A tensor that another rank sends with elements of `dtype`, and where it goes: `into`, of the same shape."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def into(self) -> Tensor: ...
    @property
    def nbytes(self) -> int: ...


class Parcels:
    """Exchanges tensors of at most PARCEL_BYTES within `group`, in parcels that are packed on `device`, and so by the
    transport of that device. On the host a tensor that is a parcel by itself is sent, and filled, where it is.
    `purpose`: as the ledger books them."""

    def __init__(self, group: Group, device: torch.device, purpose: str) -> None:
        self._group, self._device, self._purpose = group, device, purpose

    def exchange(self, target: int, out: Sequence[Tensor], source: int, coming: Sequence[Coming]) -> None:
        """Sends `out` to rank `target`, and fills what is `coming` from rank `source`, parcel by parcel."""
        for leaving, entering in zip_longest(_parcels(out), _parcels(coming)):
            sent = None if leaving is None else self._packed(leaving)
            into = None if entering is None else self._as_it_is([each.into for each in entering])
            got = self._staging[1, : _room(entering)] if entering is not None and into is None else into
            if sent is not None and got is not None:
                self._group.exchange(got, source, sent, target, self._purpose)
            elif sent is not None:
                self._group.send(sent, target, self._purpose)
            elif got is not None:
                self._group.recv(got, source, self._purpose)
            if got is not None and into is None:
                for start, each in _placed(entering):
                    each.into.copy_(got[start : start + each.nbytes].view(each.dtype).view(each.into.shape))

    def _packed(self, tensors: Sequence[Tensor]) -> Tensor:
        if (whole := self._as_it_is(tensors)) is not None:
            return whole
        parcel = self._staging[0, : _room(tensors)]
        for start, each in _placed(tensors):
            parcel[start : start + each.nbytes].view(each.dtype).view(each.shape).copy_(each)
        return parcel

    def _as_it_is(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Returns the bytes of a parcel that need not be packed; None where they have to be."""
        first, alone = tensors[0], len(tensors) == 1 and not is_accelerator(self._device)
        if not alone or is_accelerator(first.device) or first.nbytes % ALIGNED or not first.is_contiguous():
            return None
        return as_bytes(first)

    @cached_property
    def _staging(self) -> Tensor:
        """Memory of a parcel that leaves and of one that comes; always the same, since the kernel zeroes new memory."""
        return torch.empty(2, PARCEL_BYTES, dtype=torch.uint8, device=self._device)


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_S = TypeVar("_S", bound=_Sized)


def _parcels(things: Sequence[_S]) -> Iterator[list[_S]]:
    """Deals `things` out, in their order, to parcels of at most PARCEL_BYTES: sender and receiver alike."""
    parcel, size = list[_S](), 0
    for each in things:
        if parcel and size + each.nbytes > PARCEL_BYTES:
            yield parcel
            parcel, size = [], 0
        parcel.append(each)
        size += _rounded(each.nbytes)
    if parcel:
        yield parcel


def _placed(parcel: Sequence[_S]) -> Iterator[tuple[int, _S]]:
    """Yields each thing in the parcel with the byte at which it begins."""
    start = 0
    for each in parcel:
        yield start, each
        start += _rounded(each.nbytes)


def _room(parcel: Sequence[_Sized]) -> int:
    return sum(_rounded(each.nbytes) for each in parcel)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED

"""Tensors on their way between two ranks, many of them in one message of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shoal.comm import Group

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
    transport of that device. `purpose`: as the ledger books them."""

    def __init__(self, group: Group, device: torch.device, purpose: str) -> None:
        self._group, self._device, self._purpose = group, device, purpose

    def exchange(self, target: int, out: Sequence[Tensor], source: int, coming: Sequence[Coming]) -> None:
        """Sends `out` to rank `target`, and fills what is `coming` from rank `source`, parcel by parcel."""
        for leaving, entering in zip_longest(_parcels(out), _parcels(coming)):
            sent = None if leaving is None else self._packed(leaving)
            got = None if entering is None else self._staging[1, : _room(entering)]
            if sent is not None and got is not None:
                self._group.exchange(got, source, sent, target, self._purpose)
            elif sent is not None:
                self._group.send(sent, target, self._purpose)
            elif got is not None:
                self._group.recv(got, source, self._purpose)
            if got is not None:
                for start, each in _placed(entering):
                    each.into.copy_(got[start : start + each.nbytes].view(each.dtype).view(each.into.shape))

    def _packed(self, tensors: Sequence[Tensor]) -> Tensor:
        parcel = self._staging[0, : _room(tensors)]
        for start, each in _placed(tensors):
            parcel[start : start + each.nbytes].view(each.dtype).view(each.shape).copy_(each)
        return parcel

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

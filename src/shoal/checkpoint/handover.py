"""Hands the state of a run over from the ranks' memory, to be read under another plan as a checkpoint is: no file, and
no rank holds more than it held and will hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shoal.checkpoint.pieces import Piece, Want
from shoal.comm import Group
from shoal.comm.wire import pack, unpack
from shoal.errors import CheckpointError
from shoal.parallel.layout import Box, intersect, subtract

PURPOSE = "replan"

PARCEL_BYTES = 4 * 2**20
"""Most bytes that a rank sends to another at once, and half of the memory that moving takes: little enough that caches
still hold a parcel when it is sent, or taken apart."""

ALIGNED = 16
"""Bytes; each box of a parcel starts at a multiple, so that a view of its dtype can be taken there."""


@dataclass(frozen=True)
class Held:
    """A box that a rank holds: piece `index` of `rank`, which is on this host (`near`) or on another."""

    rank: int
    index: int
    box: Box
    dtype: torch.dtype
    near: bool


@dataclass(frozen=True)
class Request:
    """A box of piece `index` that this rank asks another for, and where it goes."""

    index: int
    box: Box
    dtype: torch.dtype
    into: Tensor

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


class Handover:
    """The state that the ranks of `group` hold, as a source (see source) that all of them read.

    pieces: what this rank holds; what several ranks hold is the same on each
    extra: JSON state; that of the first rank counts
    host: a name of this rank's host; a box comes from this rank itself where it is here, else from its host, else from
        another, by turns where several have it
    device: where parcels are packed, and so the transport that carries them

    A call of `load` that wants something is a round in which all ranks take part. Ranks may need different numbers of
    them: each calls `finish` at its end, which takes part in the others' rounds.
    """

    name = "the run"

    def __init__(
        self, group: Group, pieces: Sequence[Piece], extra: Mapping[str, Any], host: str, device: torch.device
    ) -> None:
        self._group, self._pieces, self._device, self._refused = group, pieces, device, False
        self.extra: Mapping[str, Any] = group.broadcast_object(dict(extra))
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._held: dict[str, list[Held]] = {}
        table = [[piece.name, list(piece.shape), piece.box, _name(piece.tensor.dtype)] for piece in pieces]
        for rank, (their_host, theirs) in enumerate(group.all_gather_object([host, table])):
            for index, (name, shape, box, dtype) in enumerate(theirs):
                self._shapes[name] = tuple(shape)
                held = Held(rank, index, box, getattr(torch, dtype), their_host == host)
                self._held.setdefault(name, []).append(held)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, wants: Sequence[Want]) -> None:
        """Fills the wants of this rank. Collective; raises CheckpointError, on all ranks alike, if one of them wants
        what no rank holds."""
        if wants:
            self._round(wants, at_the_end=False)

    def finish(self) -> None:
        """Takes part in the rounds of ranks that read more. Every rank calls it, after its last `load`."""
        while not self._round([], at_the_end=True):
            pass

    def refuse(self, reason: str) -> None:
        """Tells ranks that have come to a round, and do not know yet, why there is none. The others that are to go on
        call it alike."""
        if not self._refused:
            self._group.all_gather_object([reason, True, {}])
            self._refused = True

    @torch.no_grad()
    def _round(self, wants: Sequence[Want], at_the_end: bool) -> bool:
        """Moves what the ranks want; returns whether all of them are `at_the_end`."""
        problem, mine = "", dict[int, list[Request]]()
        try:
            mine = self._requests(wants)
        except CheckpointError as error:  # all ranks are to learn of it
            problem = str(error)
        here, size = self._group.rank, self._group.size
        # packed on their own: a rank reads what it is asked for, not what all ask of each other
        asked = {rank: pack([[each.index, each.box] for each in found]) for rank, found in mine.items() if rank != here}
        rounds = self._group.all_gather_object([problem, at_the_end, asked])
        for said, _, _ in rounds:
            if said:
                self._refused = True
                raise CheckpointError(said)
        theirs = [unpack(each[here]) if here in each else [] for _, _, each in rounds]
        for each in mine.get(here, []):
            each.into.copy_(self._values(each.index, each.box))
        for step in range(1, size):
            target, source = (here + step) % size, (here - step) % size
            out = [self._values(index, box) for index, box in theirs[target]]
            self._exchange(target, out, source, mine.get(source, []))
        return all(done for _, done, _ in rounds)

    def _requests(self, wants: Sequence[Want]) -> dict[int, list[Request]]:
        """Returns what to ask each rank for."""
        found: dict[int, list[Request]] = {}
        for number, want in enumerate(wants):
            if self._shapes.get(want.name) != tuple(want.shape):
                there = self._shapes.get(want.name, "nothing")
                raise CheckpointError(f"the run holds {there} as {want.name}, the new plan wants {tuple(want.shape)}")
            rest = [want.box] if want.box.numel else []
            for held in self._in_turn(want.name, number):
                left = list[Box]()
                for box in rest:
                    common = intersect(held.box, box)
                    if common is None:
                        left.append(box)
                        continue
                    for part in common.cut(PARCEL_BYTES // held.dtype.itemsize):
                        request = Request(held.index, part, held.dtype, want.into[part.within(want.box).slices])
                        found.setdefault(held.rank, []).append(request)
                    left += subtract(box, common)
                rest = left
            if rest:
                missing = sum(box.numel for box in rest)
                raise CheckpointError(f"no rank holds {missing} of the {want.box.numel} elements of {want.name}")
        return found

    def _in_turn(self, name: str, number: int) -> list[Held]:
        """Returns who holds boxes of the tensor, in the order in which to ask: this rank, its host, the others; ranks
        that have the same are asked by turns."""
        size = self._group.size
        turn = self._group.rank + number

        def order(held: Held) -> tuple[bool, bool, int]:
            return held.rank != self._group.rank, not held.near, (held.rank - turn) % size

        return sorted(self._held[name], key=order)

    def _values(self, index: int, box: Box) -> Tensor:
        piece = self._pieces[index]
        return piece.tensor[box.within(piece.box).slices]

    def _exchange(self, target: int, out: Sequence[Tensor], source: int, requests: Sequence[Request]) -> None:
        """Sends `out` to rank `target`, and fills the `requests` from rank `source`, parcel by parcel."""
        for leaving, coming in zip_longest(_parcels(out), _parcels(requests)):
            sent = None if leaving is None else self._packed(leaving)
            got = None if coming is None else self._staging[1, : _room(coming)]
            if sent is not None and got is not None:
                self._group.exchange(got, source, sent, target, PURPOSE)
            elif sent is not None:
                self._group.send(sent, target, PURPOSE)
            elif got is not None:
                self._group.recv(got, source, PURPOSE)
            if got is not None:
                for start, each in _placed(coming):
                    values = got[start : start + each.nbytes].view(each.dtype).view(each.box.sizes)
                    each.into.copy_(values)

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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Hands the state of a run over from the ranks' memory, to be read under another plan as a checkpoint is: no file, and
no rank holds more than it held and will hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.parcels import PARCEL_BYTES, Parcels
from shoal.checkpoint.pieces import Piece, Want
from shoal.comm import Group
from shoal.comm.wire import pack, unpack
from shoal.errors import CheckpointError
from shoal.parallel.layout import Box, intersect, subtract

PURPOSE = "replan"


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
    made: Any = None
    """The result of the last step, where no rank's caller has got it yet and all are to get it now; else None."""

    def __init__(
        self, group: Group, pieces: Sequence[Piece], extra: Mapping[str, Any], host: str, device: torch.device
    ) -> None:
        self._group, self._pieces, self._refused = group, pieces, False
        self._parcels = Parcels(group, device, PURPOSE)
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
            self._parcels.exchange(target, out, source, mine.get(source, []))
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

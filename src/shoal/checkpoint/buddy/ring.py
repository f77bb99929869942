"""Who is whose buddy, and the way from each rank to its buddy: memory of their host, or messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.buddy.room import Lent, OpenFile, Room, Shape, can_open, has_shape, lent_to_try, opened
from shoal.checkpoint.parcels import PARCEL_BYTES, Parcels
from shoal.comm import Group
from shoal.comm.processes import process_table
from shoal.comm.wire import FIRST, packed, rest_of, unpacked
from shoal.device import CPU
from shoal.errors import LaunchError

PURPOSE = "buddy"
"""The purpose under which the ledger books what goes to a buddy."""


def buddies(hosts: Sequence[str]) -> list[int]:
    """Returns the buddy of each rank, given the ranks' hosts: each rank is the buddy of one other.

    Ranks stand in a ring, host by host, and the buddy is as many places on as the largest host has ranks. That is
    another host for all of them, unless a host has more than half of the ranks.
    """
    order = sorted(range(len(hosts)), key=lambda rank: (hosts.index(hosts[rank]), rank))
    on = max(Counter(hosts).values()) % len(hosts) or 1
    found = [0] * len(hosts)
    for place, rank in enumerate(order):
        found[rank] = order[(place + on) % len(hosts)]
    return found


@dataclass(frozen=True)
class _Coming:
    into: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.into.dtype

    @property
    def nbytes(self) -> int:
        return self.into.nbytes


class Ring:
    """The way from each rank of `group` to its `buddy`, and here from the `ward`, whose buddy this rank is. All ranks
    call it alike.

    Where a rank and its buddy are on one host it writes its tensors once, into memory of both, and what it tells its
    buddy then says that they are whole. Else they are messages.
    """

    def __init__(self, group: Group, host: str) -> None:
        self._group, self._parcels = group, Parcels(group, CPU, PURPOSE)
        lent = lent_to_try()
        with nullcontext() if lent is None else closing(lent):
            told = group.all_gather_object([host, process_table(), None if lent is None else lent.place])
            self.of_all = buddies([each for each, _, _ in told])
            self.buddy, self.ward = self.of_all[group.rank], self.of_all.index(group.rank)
            near = told[self.ward][:2] == told[group.rank][:2]
            self._is_written = near and can_open(told[self.ward][2])  # the ward writes, or sends messages
            self._writes = group.all_gather_object(self._is_written)[self.buddy]  # so does this rank

    def deliver(
        self, value: Any, tensors: Sequence[Tensor], shapes: Callable[[Any], Sequence[Shape]], room: Room | None
    ) -> tuple[Any, Room]:
        """Sends a value and tensors; returns the ward's value, and the room where its tensors lie.

        value: of the types that `wire` knows
        tensors: on any device
        shapes: tells those of the ward's tensors from its value
        room: of an earlier delivery, of which nobody needs anything any more; it is used again where it fits
        """
        mine, lent = self._written(tensors, [] if room is None else room.mine)
        with nullcontext() if lent is None else closing(lent):
            told, place = self.tell([value, None if lent is None else lent.place])
            theirs = self._theirs(shapes(told), place, [] if room is None else room.theirs)
            self.carry([] if self._writes else tensors, [] if self._is_written else theirs)
            self._acknowledge(lent is not None, place is not None)
        return told, Room(mine, theirs)

    def confirm(self) -> None:
        """Waits until the buddy has come here, too: it needs nothing any more that it had let go of before."""
        self._acknowledge(self._writes, self._is_written)

    def tell(self, value: Any) -> Any:
        """Sends a value, of the types that `wire` knows, and returns the ward's."""
        mine, first = packed(value), torch.empty(FIRST, dtype=torch.uint8)
        self._group.exchange(first, self.ward, mine[:FIRST], self.buddy, PURPOSE)
        rest = torch.empty(rest_of(first), dtype=torch.uint8)
        self.carry([mine[FIRST:]], [rest])
        return unpacked(torch.cat([first, rest]))

    def carry(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Sends the tensors `out`, on any device, and fills `into`, on the host, which are like the ward's."""
        coming = [_Coming(part) for each in into for part in _parts(each)]
        self._parcels.exchange(self.buddy, [part for each in out for part in _parts(each)], self.ward, coming)

    def _written(self, tensors: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[Sequence[Tensor], Lent | None]:
        """Writes the tensors where the buddy will find them: `before`, or in memory that is lent to it first. Returns
        where they are, nowhere if they are to go as messages."""
        if not self._writes or not tensors:
            return [], None
        asked = [(each.shape, each.dtype) for each in tensors]
        lent = None if has_shape(before, asked) else Lent(asked)
        mine = before if lent is None else opened(lent.place, asked)
        nbytes, ledger = sum(each.nbytes for each in tensors), self._group.ledger
        ledger.count(self._group.name, "write", PURPOSE, nbytes, nbytes)
        with ledger.span("comm", PURPOSE, nbytes, "transfer"):
            for place, tensor in zip(mine, tensors, strict=True):
                write(place, tensor)
        return mine, lent

    def _theirs(self, shapes: Sequence[Shape], place: OpenFile | None, before: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns where the ward's tensors are, or are to come. Raises LaunchError where it has ended meanwhile."""
        if place is not None:
            try:
                return opened(place, shapes)
            except RuntimeError as error:
                rank, ward = (self._group.ranks[each] for each in (self._group.rank, self.ward))
                raise LaunchError(f"rank {rank}: what rank {ward} has written cannot be opened: {error}") from error
        if has_shape(before, shapes):
            return before
        assert not (self._is_written and shapes), "the ward has written into a room that does not fit"
        return [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]

    def _acknowledge(self, hears: bool, says: bool) -> None:
        """Waits for a word of the buddy where this rank `hears` one, and `says` one to the ward."""
        word, heard = torch.zeros(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
        if hears and says:
            self._group.exchange(heard, self.buddy, word, self.ward, PURPOSE)
        elif hears:
            self._group.recv(heard, self.buddy, PURPOSE)
        elif says:
            self._group.send(word, self.ward, PURPOSE)


def write(place: Tensor, tensor: Tensor) -> None:
    """Copies a tensor, on any device, to where the buddy finds it."""
    place.copy_(tensor)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.detach().reshape(-1).split(max(1, PARCEL_BYTES // tensor.element_size())) if tensor.numel() else ()

"""Keeps in this rank's memory what another rank, its ward, has alone; and has its own kept so by its buddy.

    begin(step)            where a snapshot is due: the state before `step` goes to the buddy
    log(step, touched)     before the vote: the reduced gradients of what is alone, and what else the update goes by
    made(step, ...)        after it: that the update is made, which all ranks know alike

All have voted for an update once its log has come, so whoever dies then, what its update would have made can be
replayed. A snapshot takes the place of the one before once it has come as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.buddy.replay import Made, Make, Update, replayed
from shoal.checkpoint.buddy.ring import Ring
from shoal.checkpoint.buddy.room import Room
from shoal.checkpoint.buddy.snapshot import About, Alone, Mine, Snapshot, alone, facts, taken
from shoal.checkpoint.pieces import Piece
from shoal.comm import Group
from shoal.comm.wire import sent
from shoal.device import finish


@sent
@dataclass(frozen=True)
class Known:
    """What a rank tells the others that are left.

    - `rank`: its number before
    - `buddies`: of each rank then; `needed`: the ranks that had something alone
    - `made`: the updates that it knows of, by step
    - `trains`: the parameters of which it knows whether backward has reached them
    """

    rank: int
    buddies: list[int]
    needed: list[int]
    made: dict[int, Made]
    trains: list[str]


@dataclass(frozen=True)
class Offer:
    """The state of a `rank` that is gone, or behind: `pieces`, and of the JSON state what its optimizer has."""

    rank: int
    pieces: Sequence[Piece]
    optimizer: Mapping[str, Any]


class Buddy:
    """Keeps the state of this rank's ward. All ranks call each method but `known` and `offer` alike.

    - `group`: all ranks, for this alone; `host`: this rank's
    - `every`: a snapshot is due after so many steps
    - `mine`: what is kept of this rank
    - `make`: makes an optimizer like its own over other chunks; `device`: where that updates what no host does
    """

    def __init__(self, group: Group, host: str, every: int, mine: Mine, make: Make, device: torch.device) -> None:
        self._group, self._host, self._every, self._mine = group, host, every, mine
        self._make, self._device = make, device
        self._met: Ring | None = None
        self._alone: Alone | None = None  # None: to be found out anew
        self._needed: list[int] = []
        self._kept: Snapshot | None = None
        self._told: About | None = None  # what the buddy has in its last snapshot
        self._last, self._is_due = 0, True
        self._made: dict[int, Made] = {}
        self._touched: Mapping[str, bool] = {}
        self._spare: Room | None = None  # of the snapshot before the last: the next one comes there
        self._free: list[Room] = []  # of gradients that nobody replays any more

    @property
    def _ring(self) -> Ring:
        self._met = self._met or Ring(self._group, self._host)
        return self._met

    def forget(self) -> None:
        """Drops what is kept, since the state has become another one, by a load."""
        self._kept = self._told = None
        self._made.clear()
        self.follow()

    def follow(self) -> None:
        """Has the next step begin with a snapshot, since chunks were cut anew. Until then what is kept holds."""
        self._is_due, self._alone, self._spare, self._free = True, None, None, []

    def begin(self, step: int) -> None:
        """Takes a snapshot before `step`, where one is due."""
        if self._is_due or not 0 <= step - self._last < self._every:
            self.snapshot(step)

    @torch.no_grad()
    def snapshot(self, step: int) -> None:
        """Sends what only this rank has of the state before `step`, and receives the ward's."""
        is_new = self._alone is None
        if self._alone is None:
            self._alone = alone(self._mine, self._group)
            needs = self._group.all_gather_object(bool(self._alone))
            self._needed = [place for place, needed in enumerate(needs) if needed]
        if self._needed:
            self._receive(step, self._alone, is_new)
        # others may still need the updates since their snapshot before
        self._made = {each: made for each, made in self._made.items() if each >= self._last}
        self._last, self._is_due = step, False

    def _receive(self, step: int, alone: Alone, is_new: bool) -> None:
        old = self._kept
        about, rest, out = taken(self._mine, alone)
        known = about == self._told
        mine = [None if known else about, rest]
        told, room = self._ring.deliver(mine, out, lambda told: _about(told, old).shapes, self._spare)
        theirs, self._told = _about(told, old), about
        for chunk in alone.chunks:
            if chunk.spec.keep != "whole":
                chunk.rest()  # to look at masters has opened them
        if is_new or old is None:
            out = [chunk.owned.data for chunk in alone.frozen]
            _, frozen = self._ring.deliver(None, out, lambda _: theirs.shapes_of_frozen, None)
        else:
            frozen = old.frozen
        self._kept = Snapshot(step, theirs, told[1], room, frozen)
        self._ring.confirm()
        if not is_new and old is not None:
            self._spare, self._free = old.room, [*self._free, *old.rooms_of_log]

    @torch.no_grad()
    def log(self, step: int, touched: Mapping[str, bool]) -> None:
        """Sends what the update of `step` will be made with, as far as it is known before the vote. `touched`: whether
        a backward here has reached each parameter."""
        self._touched = touched
        if not self._needed:
            return
        assert self._alone is not None and self._kept is not None
        about, mine = self._kept.about, facts(self._mine, self._alone, touched)
        out = [chunk.owned.gradient for chunk in self._alone.chunks]
        if any(gradient.is_cpu for gradient in out):
            finish(self._device)  # they may still be on their way to the host
        room = self._free.pop() if self._free else None
        self._kept.log[step] = self._ring.deliver(mine, out, lambda _: about.shapes_of_gradients, room)

    def made(self, step: int, factor: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        """Remembers the update of `step`, which all have voted for (see Made)."""
        if self._needed:
            self._made[step] = Made(factor, skip, list(untouched))

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory that are kept for the ward."""
        rooms = [*self._free, *([] if self._spare is None else [self._spare])]
        return sum(room.nbytes for room in [*rooms, *([] if self._kept is None else self._kept.rooms)])

    def known(self) -> Known | None:
        """Returns what this rank tells the others that are left; None where no rank has anything alone."""
        if not self._needed:
            return None
        return Known(self._group.rank, self._ring.of_all, self._needed, self._made, list(self._touched))

    def offer(self, step: int, whole: Collection[int], told: Sequence[Known]) -> Offer | None:
        """Returns the ward's state before `step`, if it is needed and can be had.

        whole: the ranks that hold theirs
        told: what the ranks that are left know
        """
        kept = self._kept
        if kept is None or self._ring.ward in whole or step < kept.step:
            return None
        updates = dict[int, Update]()
        for each in range(kept.step, step):
            if each not in kept.log:
                return None
            knowing = [(known, known.made[each]) for known in told if each in known.made]
            if knowing:
                reached = {name for known, made in knowing for name in set(known.trains).difference(made.untouched)}
                updates[each] = Update(knowing[0][1], reached)
        return Offer(self._ring.ward, *replayed(kept, step, updates, self._make, self._device))


def _about(told: Sequence[Any], last: Snapshot | None) -> About:
    """Returns the description that the ward has `told`, or left out because it is that of the `last` snapshot."""
    about: About | None = told[0]
    if about is None:
        assert last is not None
        return last.about
    return about

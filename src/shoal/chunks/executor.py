"""Brings blocks of memory in before they are used and lets them go: the first time as they are asked for, then by plan.

    ABSENT -> COMING -> HERE -> ABSENT        a block that is in use is HERE and does not go

The first pass of a kind is recorded; from the second on its plan of moves runs (see movement). A pass that uses other blocks than the
recorded one goes on as the first did, and is recorded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from typing import Protocol

from shoal.chunks.movement import Planned, Tick, Trace, plan
from shoal.chunks.tier import MOVING, Tier
from shoal.comm import Lane
from shoal.comm.lane import Ticket
from shoal.errors import BudgetExceeded


class Movable(Protocol):
    """A block: `open` makes room for it, on the caller's thread; `fill` brings its bytes, on the lane; `let_go` frees the room. `settle` waits for what
    `fill` waits for, where it comes from."""

    @property
    def nbytes_whole(self) -> int: ...
    def open(self) -> None: ...
    def fill(self) -> None: ...
    def let_go(self) -> None: ...
    def settle(self) -> None: ...


class State(Enum):
    ABSENT = "no memory"
    COMING = "memory, and the lane fills it"
    HERE = "to be used"


class Executor:
    """Moves `blocks`, known by their places, on `lane`, within what `tier` has left beside its other users.

    Without a tier, what is used together fits and one more: the one on its way. `bytes_in` counts what has come, `most` is the most that was there
    at a time. `agree`: gives the smallest of what all ranks have, elementwise, where they bring blocks together: then all of them must make the same moves,
    whatever else each has in its tier. `spare`: what the tier would have left at any moment of the last recorded pass if all blocks were there.
    """

    def __init__(
        self,
        blocks: Sequence[Movable],
        lane: Lane,
        tier: Tier | None = None,
        ahead: int = 1,
        agree: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        self._agree = agree
        self._blocks, self._lane, self._tier, self._ahead = blocks, lane, tier, ahead
        self._sizes = [block.nbytes_whole for block in blocks]
        self._states = [State.ABSENT] * len(blocks)
        self._tickets: dict[int, Ticket] = {}
        self._used_at = [0] * len(blocks)
        self._plans: dict[Hashable, Planned] = {}
        self._key: Hashable = None
        self._follows: Planned | None = None
        self._trace: list[frozenset[int]] = []
        self._others: list[int] = []  # bytes that others have at most at each tick
        self._held = 0
        self.active = False
        self.bytes_in = self.most = 0
        self.spare = 0
        if tier is not None:
            tier.relieve = self._relieve

    def begin(self, key: Hashable) -> None:
        """A pass of the kind `key`; whatever an earlier one left is let go."""
        self._all_goes()
        self._key, self._trace, self._others, self.active = key, [], [], True
        self._follows = self._plans.get(key)
        if self._tier is not None:
            self._tier.measures = self._follows is None
            self._tier.most_others()

    def end(self) -> None:
        """The pass is over: all goes. Raises BudgetExceeded, with the smallest budget that would do, if it was the first of its kind and the tier is too
        small for it."""
        for place, state in enumerate(self._states):
            if state is State.COMING:
                self._arrive(place)
        trace = self._all_goes()
        if trace and (self._follows is None or self._follows.trace != trace):
            self._follows = None
            room = self._room(trace)
            room = self._agree(room) if self._agree is not None else room
            needed = [sum(self._sizes[place] for place in blocks) for blocks in trace]
            short = max(need - left for need, left in zip(needed, room, strict=True))
            if short > 0:
                assert self._tier is not None and self._tier.capacity is not None
                capacity = self._tier.capacity
                raise BudgetExceeded(capacity + short, capacity, f"{self._tier.name} memory for weights in use and all else")
            self._plans[self._key] = Planned(trace, plan(trace, self._sizes, room, self._ahead), tuple(self._sizes), tuple(room))
            self.spare = min(room) - sum(self._sizes)

    @property
    def followed(self) -> Planned | None:
        """The plan of the pass that is under way, or of the last one; None if that went another way, or was the first of its kind."""
        return self._follows

    def forget_block(self, place: int) -> None:
        """The block at `place` is always there, and nobody's to move; passes are recorded anew."""
        self._sizes[place] = 0
        self._plans.clear()

    def forget(self) -> None:
        """The pass was cut short by an error: all goes, nothing is learned."""
        self._lane.drain()
        self._all_goes()

    def _all_goes(self) -> Trace:
        """Returns what the pass used."""
        for place, state in enumerate(self._states):
            if state is not State.ABSENT:
                self._release(place)
        if self._tier is not None:
            self._tier.measures = False
            self._others.append(self._tier.most_others())
        self.active, self._trace, trace = False, [], tuple(self._trace)
        return trace

    def use(self, wanted: Iterable[int]) -> None:
        """Returns when `wanted`, all that is needed now, is there; what else is there may go from now on."""
        blocks = frozenset(wanted)
        if self._trace and self._trace[-1] == blocks:
            return
        tick = len(self._trace)
        self._trace.append(blocks)
        if self._tier is not None:
            self._others.append(self._tier.most_others())
        if self._follows is not None and self._follows.trace[tick : tick + 1] != (blocks,):
            self._follows = None  # another pass than the one that was planned
        if self._follows is not None:
            self._move(self._follows.moves[tick], blocks)
        else:
            self._make_room(blocks)
        for place in sorted(blocks):
            self._used_at[place] = tick
            if self._states[place] is State.ABSENT:
                self._fetch(place)
        for place in sorted(blocks):
            if self._states[place] is State.COMING:
                self._arrive(place)

    def _move(self, moves: Tick, blocks: frozenset[int]) -> None:
        """Makes `moves`, but what is not among `blocks` comes later if others have taken its room; where ranks move together none can wait alone."""
        for place in moves.release:
            if self._states[place] is State.HERE:
                self._release(place)
        for place in moves.fetch:
            may_wait = place not in blocks and self._agree is None
            if self._states[place] is State.ABSENT and not (may_wait and self._is_taken(place)):
                self._fetch(place)

    def _is_taken(self, place: int) -> bool:
        """Whether the tier has no room for the block at `place`."""
        tier = self._tier
        return tier is not None and tier.capacity is not None and tier.used + self._sizes[place] > tier.capacity

    def _make_room(self, blocks: frozenset[int]) -> None:
        """Lets go what was used longest ago until `blocks` fit."""
        if self._tier is None:
            room = self._room((blocks,))[0]
        elif self._tier.capacity is None:
            return
        elif self._agree is not None:
            room = 0
        else:
            room = self._tier.capacity - self._tier.others()
        missing = sum(self._sizes[place] for place in blocks if self._states[place] is State.ABSENT)
        self._let_go(self._held + missing - room, blocks)

    def _relieve(self, nbytes: int) -> None:
        """The tier asks for that much. Where ranks move together none can help itself."""
        if self._agree is None:
            self._let_go(nbytes, self._trace[-1] if self._trace else frozenset())

    def _let_go(self, nbytes: int, needed: frozenset[int]) -> None:
        """Frees that much, or all that there is but for what is `needed`; what was used longest ago first."""
        others = [place for place, state in enumerate(self._states) if state is not State.ABSENT and place not in needed]
        target = self._held - nbytes
        for place in sorted(others, key=lambda place: self._used_at[place]):
            if self._held <= target:
                break
            if self._states[place] is State.COMING:
                self._arrive(place)
            self._release(place)

    def _room(self, trace: Trace) -> list[int]:
        """Of each tick: what the tier has left beside the others, or the largest that `trace` uses together and one block more."""
        if self._tier is None:
            return [max(sum(self._sizes[place] for place in blocks) for blocks in trace) + max(self._sizes)] * len(trace)
        if self._tier.capacity is None:
            return [sum(self._sizes)] * len(trace)
        return [self._tier.capacity - others for others in self._others[1 : len(trace) + 1]]

    def _fetch(self, place: int) -> None:
        block, size = self._blocks[place], self._sizes[place]
        if self._tier is not None:
            self._tier.take(MOVING, size, f"the weights of chunk {place}")
        block.open()
        self._held += size
        self.most = max(self.most, self._held)
        self.bytes_in += size
        self._states[place] = State.COMING
        self._tickets[place] = self._lane.submit(block.fill, f"weights {place}")

    def _arrive(self, place: int) -> None:
        self._blocks[place].settle()  # so that this wait and that for the transfer are told apart
        self._tickets[place].wait("weights")
        self._states[place] = State.HERE

    def _release(self, place: int) -> None:
        self._tickets.pop(place, None)
        self._blocks[place].let_go()
        self._states[place] = State.ABSENT
        self._held -= self._sizes[place]
        if self._tier is not None:
            self._tier.give(MOVING, self._sizes[place])

"""Brings blocks of memory in before they are used and lets them go: the first time as they are asked for, then by plan.

    ABSENT -> COMING -> HERE -> ABSENT        a block that is in use is HERE and does not go

The first pass of a kind is recorded; from the second on its plan of moves runs (see `movement`). What is in use
together may depend on the number of samples, and ranks that move together need not have the same: a part of what the
next tick uses is that tick, and another use of what is in memory moves nothing. A pass that uses other blocks than that
goes on as the first did, and is recorded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Protocol

from shoal.chunks.movement import Planned, Tick, Trace, plan
from shoal.chunks.tier import MOVING, Tier
from shoal.comm import Lane
from shoal.comm.lane import Ticket
from shoal.device import is_accelerator
from shoal.errors import BudgetExceeded


class Movable(Protocol):
    """A block: `open` allocates its memory, on the caller's thread; `fill` brings its bytes, on the lane; `let_go`
    frees the memory. `settle` waits for what `fill` waits for, an update of the block."""

    @property
    def nbytes_whole(self) -> int: ...
    def open(self) -> None: ...
    def fill(self) -> None: ...
    def let_go(self) -> None: ...
    def settle(self) -> None: ...


class Pause(Enum):
    """Where a rank asks for no block."""

    BACKWARD = "none, its backward begins"
    NEW = "none, at the end of a pass that was not as earlier ones"
    KNOWN = "none, at the end of a pass as earlier ones"


class State(Enum):
    ABSENT = "no memory"
    COMING = "memory, and the lane fills it"
    HERE = "to be used"


class Executor:
    """Moves `blocks`, known by their indices, on `lane`, within what `tier` has left beside its other users.

    - `tier`: without one there is room for what is used together and one block more, which is on its way
    - `ahead`: blocks on their way for later use at a time
    - `agree`: takes the elementwise minimum over all ranks, where they gather blocks together: then all of them must
      make the same moves, whatever else each has in its tier
    - `alike`: raises an error where another rank asks for a block while this one asks for none: at a backward's
      beginning, and at the end of a pass (see Pause)
    - `bytes_in`: bytes that have come; `most`: the most that were in memory at a time
    - `spare`: bytes that the tier would have left at any moment of the last recorded pass if all blocks were in memory
    """

    def __init__(
        self,
        blocks: Sequence[Movable],
        lane: Lane,
        tier: Tier | None = None,
        ahead: int = 1,
        agree: Callable[[list[int]], list[int]] | None = None,
        alike: Callable[[Pause], None] | None = None,
    ) -> None:
        self._agree, self._alike = agree, alike
        self._blocks, self._lane, self._tier, self._ahead = blocks, lane, tier, ahead
        self._sizes = [block.nbytes_whole for block in blocks]
        self._states = [State.ABSENT] * len(blocks)
        self._tickets: dict[int, Ticket] = {}
        self._used_at = [0] * len(blocks)
        self._plans: dict[Hashable, Planned] = {}
        self._key: Hashable = None
        self._follows: Planned | None = None
        self._done = 0  # ticks of that plan
        self._trace: list[frozenset[int]] = []
        self._others: list[int] = []  # bytes that others have at most at each tick
        self._held = 0
        self.active = False
        self.bytes_in = self.most = 0
        self.spare = 0
        if tier is not None:
            tier.relieve = self._relieve

    def begin(self, key: Hashable) -> None:
        """Begins a pass of the kind `key`; whatever an earlier one left is let go."""
        self._all_goes()
        self._key, self._trace, self._others, self.active = key, [], [], True
        self._follows, self._done = self._plans.get(key), 0
        if self._tier is not None:
            self._tier.measures = self._follows is None
            self._tier.most_others()

    def end(self) -> None:
        """Ends the pass: all blocks go.

        Raises BudgetExceeded, with the smallest budget that would do, if the pass was the first of its kind and the
        tier is too small for it.
        """
        for index, state in enumerate(self._states):
            if state is State.COMING:
                self._arrive(index)
        trace = self._all_goes()
        is_new = bool(trace) and (self._follows is None or self._done < len(self._follows.trace))
        self._pause(Pause.NEW if is_new else Pause.KNOWN)
        if is_new:
            self._follows = None
            room = self._room(trace)
            room = self._agree(room) if self._agree is not None else room
            needed = [sum(self._sizes[index] for index in blocks) for blocks in trace]
            short = max(need - left for need, left in zip(needed, room, strict=True))
            if short > 0:
                assert self._tier is not None and self._tier.capacity is not None
                capacity, what = self._tier.capacity, f"{self._tier.name} memory for weights in use and all else"
                raise BudgetExceeded(capacity + short, capacity, what)
            moves = plan(trace, self._sizes, room, self._ahead)
            self._plans[self._key] = Planned(trace, moves, tuple(self._sizes), tuple(room))
            self.spare = min(room) - sum(self._sizes)

    def backward(self) -> None:
        """Begins a backward, whose gradients may wait for ranks that would wait for a block."""
        if self.active:
            self._pause(Pause.BACKWARD)

    def _pause(self, pause: Pause) -> None:
        if self._alike is not None:
            self._lane.submit(partial(self._alike, pause), "which weights").wait("weights")

    @property
    def followed(self) -> Planned | None:
        """Plan of the pass under way, or of the last one; None if that went another way, or was the first of its
        kind."""
        return self._follows

    def forget_block(self, index: int) -> None:
        """Leaves the block at `index` alone from now on: it is always there. Passes are recorded anew."""
        self._sizes[index] = 0
        self._plans.clear()

    def forget(self) -> None:
        """Ends a pass that an error cut short: all blocks go, nothing is learned."""
        self._lane.drain()
        self._all_goes()

    def _all_goes(self) -> Trace:
        """Lets all blocks go; returns what the pass used."""
        if self._tier is not None:
            self._tier.measures = False
            self._others.append(self._tier.most_others())
        for index, state in enumerate(self._states):
            if state is not State.ABSENT:
                self._release(index)
        self.active, self._trace, trace = False, [], tuple(self._trace)
        return trace

    def use(self, wanted: Iterable[int]) -> None:
        """Returns when `wanted`, all that is needed now, is in memory; other blocks may go from now on."""
        blocks = frozenset(wanted)
        if self._trace and self._trace[-1] == blocks:
            return
        tick = len(self._trace)
        self._trace.append(blocks)
        if self._tier is not None:
            self._others.append(self._tier.most_others())
        if self._follows is not None and any(
            blocks <= each for each in self._follows.trace[self._done : self._done + 1]
        ):
            self._move(self._follows.moves[self._done], blocks)
            self._done += 1
        elif self._follows is None or any(self._states[index] is State.ABSENT for index in blocks):
            self._follows = None  # another pass than the one that was planned
            self._make_room(blocks)
        for index in sorted(blocks):
            self._used_at[index] = tick
            if self._states[index] is State.ABSENT:
                self._fetch(index)
        if self._tier is not None:
            self._tier.moved()
        for index in sorted(blocks):
            if self._states[index] is State.COMING:
                self._arrive(index)

    def _move(self, moves: Tick, blocks: frozenset[int]) -> None:
        """Makes `moves`; a block that is not among `blocks` comes later if others have taken its room, unless ranks
        move together, where none can wait alone."""
        for index in moves.release:
            if self._states[index] is State.HERE:
                self._release(index)
        for index in moves.fetch:
            may_wait = index not in blocks and self._agree is None
            if self._states[index] is State.ABSENT and not (may_wait and self._is_taken(index)):
                self._fetch(index)

    def _is_taken(self, index: int) -> bool:
        """Whether the tier has no room for the block at `index`."""
        tier = self._tier
        return tier is not None and tier.capacity is not None and tier.used + self._sizes[index] > tier.capacity

    def _make_room(self, blocks: frozenset[int]) -> None:
        """Lets blocks go, used longest ago first, until `blocks` fit."""
        if self._tier is None:
            room = self._room((blocks,))[0]
        elif self._tier.capacity is None:
            return
        elif self._agree is not None or is_accelerator(self._tier.device):  # where others are seen only afterwards
            room = 0
        else:
            room = self._tier.capacity - self._tier.others()
        missing = sum(self._sizes[index] for index in blocks if self._states[index] is State.ABSENT)
        self._let_go(self._held + missing - room, blocks)

    def _relieve(self, nbytes: int) -> None:
        """Frees `nbytes` for the tier; where ranks move together none can help itself."""
        if self._agree is None:
            self._let_go(nbytes, self._trace[-1] if self._trace else frozenset())

    def _let_go(self, nbytes: int, needed: frozenset[int]) -> None:
        """Frees `nbytes`, or all that is not `needed`; blocks used longest ago go first."""
        others = [i for i, state in enumerate(self._states) if state is not State.ABSENT and i not in needed]
        target = self._held - nbytes
        for index in sorted(others, key=lambda index: self._used_at[index]):
            if self._held <= target:
                break
            if self._states[index] is State.COMING:
                self._arrive(index)
            self._release(index)

    def _room(self, trace: Trace) -> list[int]:
        """Bytes for blocks at each tick: what the tier has left, or the most that `trace` uses together and one block
        more."""
        if self._tier is None:
            most = max(sum(self._sizes[index] for index in blocks) for blocks in trace)
            return [most + max(self._sizes)] * len(trace)
        if self._tier.capacity is None:
            return [sum(self._sizes)] * len(trace)
        return [self._tier.capacity - others for others in self._others[1 : len(trace) + 1]]

    def _fetch(self, index: int) -> None:
        block, size = self._blocks[index], self._sizes[index]
        if self._tier is not None:
            self._tier.take(MOVING, size, f"the weights of chunk {index}")
        block.open()
        self._held += size
        self.most = max(self.most, self._held)
        self.bytes_in += size
        self._states[index] = State.COMING
        self._tickets[index] = self._lane.submit(block.fill, f"weights {index}")

    def _arrive(self, index: int) -> None:
        self._blocks[index].settle()  # so that this wait and that for the transfer are told apart
        self._tickets[index].wait("weights")
        self._states[index] = State.HERE

    def _release(self, index: int) -> None:
        self._tickets.pop(index, None)
        self._blocks[index].let_go()
        self._states[index] = State.ABSENT
        self._held -= self._sizes[index]
        if self._tier is not None:
            self._tier.give(MOVING, self._sizes[index])

"""Updates that run during the next forward. They are exact: whoever needs a chunk's weights waits for its update, and
backward waits for all.

step t      ... backward | norm, vote |
updates                               | chunk 3 | chunk 2 | chunk 1 | chunk 0 |        in the order of the forward
step t + 1                            | forward: layers of chunk 3 | of chunk 2 ...    | backward
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from shoal.chunks.chunk import Chunk
from shoal.comm.lane import Lane, Ticket

CAUSE = "update"
"""Cause of the trainer's waits for them, in the ledger."""


@dataclass(frozen=True)
class _UnderWay:
    """The updates of a step: of the chunks `waits` (by index), of which those of `done` have theirs. `tickets`: of each
    update, and of what comes after the last one."""

    waits: frozenset[int]
    done: set[int] = field(default_factory=set)
    tickets: list[Ticket] = field(default_factory=list)

    def next_of(self, updates: Iterator[Chunk]) -> None:
        self.done.add(next(updates).index)

    @staticmethod
    def rest_of(updates: Iterator[Chunk]) -> None:
        deque(updates, maxlen=0)


class DeferredUpdate:
    """Runs the updates of each step on `lane`, a thread of the host, which it closes in the end."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._under_way: _UnderWay | None = None
        atexit.register(lane.close)  # a process that ends in the middle of one would be aborted

    def start(self, chunks: Iterable[Chunk], updates: Iterator[Chunk]) -> None:
        """Runs `updates`, which yields each of `chunks` when it is updated. Whoever calls `chunk.fill` waits for
        that."""
        self.settle()
        under_way = _UnderWay(frozenset(chunk.index for chunk in chunks))
        for work in (*[under_way.next_of] * len(under_way.waits), under_way.rest_of):
            under_way.tickets.append(self._lane.submit(partial(work, updates), CAUSE))
        self._under_way = under_way

    def wait_for(self, chunk: Chunk) -> None:
        """Returns when `chunk` is updated; raises what went wrong with the updates."""
        under_way = self._under_way  # as it is now: the trainer's thread may settle meanwhile
        if under_way is None or chunk.index not in under_way.waits:
            return
        if under_way.tickets[-1].error is not None:
            under_way.tickets[-1].wait(CAUSE)
        for ticket in under_way.tickets:
            if chunk.index in under_way.done:
                return
            if not ticket.done or ticket.error is not None:
                ticket.wait(CAUSE)

    def settle(self) -> None:
        """Returns when all chunks are updated; raises what went wrong, each time: the weights are then those of no
        step."""
        if self._under_way is not None:
            self._under_way.tickets[-1].wait(CAUSE)
            self._under_way = None

    def close(self) -> None:
        """Ends the thread."""
        atexit.unregister(self._lane.close)
        self._lane.close()

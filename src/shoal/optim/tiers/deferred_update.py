"""Updates that go on while the next forward begins: exact, since whoever needs a chunk's weights waits for that chunk's update, and backward for all.

step t      ... backward | norm, vote |
updates                               | chunk 3 | chunk 2 | chunk 1 | chunk 0 |        in the order of the forward
step t + 1                            | forward: layers of chunk 3 | of chunk 2 ...    | backward
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from shoal.chunks.chunk import Chunk
from shoal.comm.ledger import Ledger

CAUSE = "update"
"""What the trainer waits for then, in the ledger."""


class Later:
    """A thread for the updates of one step after the other. `ledger`: told how long others wait for them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-update")
        self._done: dict[int, threading.Event] = {}
        self._work: Future[None] | None = None

    def start(self, chunks: Iterable[Chunk], updates: Iterator[Chunk]) -> None:
        """Runs through `updates`, which updates one of `chunks` after the other and gives it when that is done. Whoever calls `chunk.fill` waits for it."""
        self.settle()
        self._done = {chunk.index: threading.Event() for chunk in chunks}
        self._work = self._thread.submit(self._run, updates)

    def _run(self, updates: Iterator[Chunk]) -> None:
        self._ledger.runs_aside()
        try:
            for chunk in updates:
                self._done[chunk.index].set()
        finally:
            for each in self._done.values():  # who waits gets the error
                each.set()

    def wait_for(self, chunk: Chunk) -> None:
        """Returns when `chunk` is updated; raises what went wrong with the updates."""
        work, done = self._work, self._done.get(chunk.index)  # of this moment: the trainer's thread may settle meanwhile
        if work is not None and done is not None:
            with self._ledger.stall(CAUSE):
                done.wait()
            if work.done():
                work.result()

    def settle(self) -> None:
        """Returns when all is updated; raises what went wrong, each time: the weights then are those of no step."""
        if self._work is not None:
            with self._ledger.stall(CAUSE):
                self._work.result()
            self._work = None

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

"""Updates that run during the next forward. They are exact: whoever needs a chunk's weights waits for its update, and
backward waits for all.

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
"""Cause of the trainer's waits for them, in the ledger."""


class DeferredUpdate:
    """Runs the updates of each step on a thread. `ledger`: told how long others wait for them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-update")
        self._done: dict[int, threading.Event] = {}
        self._work: Future[None] | None = None

    def start(self, chunks: Iterable[Chunk], updates: Iterator[Chunk]) -> None:
        """Runs `updates`, which yields each of `chunks` when it is updated. Whoever calls `chunk.fill` waits for
        that."""
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
        # both as they are now: the trainer's thread may settle meanwhile
        work, done = self._work, self._done.get(chunk.index)
        if work is not None and done is not None:
            with self._ledger.stall(CAUSE):
                done.wait()
            if work.done():
                work.result()

    def settle(self) -> None:
        """Returns when all chunks are updated; raises what went wrong, each time: the weights are then those of no
        step."""
        if self._work is not None:
            with self._ledger.stall(CAUSE):
                self._work.result()
            self._work = None

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()

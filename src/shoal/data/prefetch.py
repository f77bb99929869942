"""An iterator that works ahead in a thread, so that reading overlaps with computing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterates over `source` in a daemon thread, at most `depth` items ahead of who asks for them.

    What `source` raises is raised to the consumer, in its place in the order. `close()`, or leaving the `with` block, ends
    the thread once the item in work is done. A source that communicates with other ranks must not run here: its calls
    would mix with those of the consumer.
    """

    def __init__(self, source: Iterator[T], depth: int = 2) -> None:
        self._outcomes: SimpleQueue[Future[T]] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(source,), name="shoal-prefetch", daemon=True)
        self._thread.start()

    def _work(self, source: Iterator[T]) -> None:
        ended = False
        while not ended:
            self._room.acquire()
            if self._closed.is_set():
                return
            outcome: Future[T] = Future()
            try:
                outcome.set_result(next(source))
            except BaseException as error:  # StopIteration too: the consumer raises whatever it is
                outcome.set_exception(error)
                ended = True
            self._outcomes.put(outcome)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._closed.is_set():
            raise StopIteration
        outcome = self._outcomes.get()
        self._room.release()
        if outcome.exception() is not None:
            self.close()
        return outcome.result()

    def close(self) -> None:
        """Ends the thread and waits for it. Nothing more is read from the source."""
        self._closed.set()
        self._room.release()  # wakes a thread that waits for room
        self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

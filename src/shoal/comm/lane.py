"""A lane: communication in strict order beside the computation. A thread on CPU, a side stream on CUDA.

Order is what makes every algorithm plain blocking code: all ranks issue the same operations in the same order, whatever the order
in which gradients happened to be ready.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from shoal.comm.ledger import Ledger, Span


class Lane:
    """Runs submitted functions one after the other, away from the caller.

    `wait` returns when all have run (on CUDA: makes the current stream wait) and raises the first error; what was submitted after
    a failed one is dropped. `close` ends the thread. While `ledger` records, it gets how long each piece of work lay in the queue, and
    how long `wait` waited; on CUDA neither can be seen from the host.
    """

    def __init__(self, device: torch.device, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], str, float] | None] = queue.SimpleQueue()
        self._pending = 0
        self._done = threading.Condition()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None], name: str = "") -> None:
        """Queues `work` behind what was submitted before; `name` is that of its spans."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shoal-lane", daemon=True)
            self._thread.start()
        with self._done:
            self._pending += 1
        self._queue.put((work, name, time.time()))

    def wait(self) -> None:
        """Returns when the lane is empty; raises the first error of the work, once."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        with self._ledger.span("wait", "lane", phase="wait"), self._done:
            self._done.wait_for(lambda: self._pending == 0)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread after the work queued so far."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, name, submitted = entry
            if self._ledger.recording:
                self._ledger.add(Span(self._ledger.step, "queue", name, submitted, time.time() - submitted, 0, "queue"))
            error: BaseException | None = None
            if self._error is None:
                try:
                    work()
                except BaseException as caught:  # handed to the trainer's thread, which raises it in `wait`
                    error = caught
            with self._done:
                self._error = self._error or error
                self._pending -= 1
                self._done.notify_all()
            del entry, work  # the work may hold the last reference to large tensors

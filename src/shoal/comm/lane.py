"""A lane: communication in strict order beside the computation, on a thread (CPU) or a side stream (CUDA).

The order lets every algorithm be plain blocking code: all ranks issue the same operations in the same order, whatever
the order in which gradients happened to be ready.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from shoal.comm.ledger import Ledger, Span
from shoal.device import Event, Stream, current_stream, new_stream, on_stream

EXCHANGE = "exchange"
"""The default cause of a wait: the exchange, awaited at the end of a backward."""


class Ticket:
    """One piece of work on a lane.

    `wait` returns when the work has run (on CUDA it makes the current stream wait), or raises its error; `cause` names
    what is waited for in the ledger.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._event: Event | None = None
        self.done = False
        self.error: BaseException | None = None

    def wait(self, cause: str = EXCHANGE) -> None:
        if self._event is not None:
            with self._lane.ledger.span("wait", cause, phase="wait"):
                self._lane._computation.wait_event(self._event)
        else:
            self._lane.wait(self, cause)


class Lane:
    """Runs submitted functions one after the other, away from the caller.

    `wait` returns when all have run (on CUDA it makes the current stream wait) and raises the first error; what was
    submitted after a failed one is dropped. While `ledger` records, it gets the time of each
    piece of work in the queue, which on CUDA the host cannot see, and the time of each `wait` with its cause.
    """

    def __init__(self, device: torch.device, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger()
        self._device, self._stream = device, new_stream(device)
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], str, float, Ticket] | None] = queue.SimpleQueue()
        self._pending = 0
        self._done = threading.Condition()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def _computation(self) -> Stream:
        """The caller's stream, beside which an accelerator's lane runs."""
        stream = current_stream(self._device)
        assert stream is not None, "a CPU's lane is a thread"
        return stream

    def another(self) -> Lane:
        """Makes one more lane beside the same computation; the caller closes it."""
        return Lane(self._device, self.ledger)

    def submit(self, work: Callable[[], None], name: str = "") -> Ticket:
        """Queues `work` behind what was submitted before; `name` names its spans."""
        ticket = Ticket(self)
        if self._stream is not None:
            self._stream.wait_stream(self._computation)
            with on_stream(self._stream), self.ledger.beside():
                work()
                ticket._event = self._stream.record_event()
            return ticket
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="shoal-lane", daemon=True)
            self._thread.start()
        with self._done:
            self._pending += 1
        self._queue.put((work, name, time.time(), ticket))
        return ticket

    def wait(self, ticket: Ticket | None = None, cause: str = EXCHANGE) -> None:
        """Waits until the lane is empty, or `ticket` has run; raises the first error of the work, once."""
        if self._stream is not None:
            with self.ledger.span("wait", cause, phase="wait"):
                self._computation.wait_stream(self._stream)
            return
        with self.ledger.stall(cause), self._done:
            self._done.wait_for(lambda: self._pending == 0 if ticket is None else ticket.done)
            error = self._error if ticket is None else ticket.error
            if self._pending == 0:  # until then, work queued behind the failed one is dropped
                self._error = None
        if error is not None:
            raise error

    def drain(self) -> None:
        """Waits until the lane is empty and discards errors."""
        if self._stream is not None:
            self._computation.wait_stream(self._stream)
            return
        with self._done:
            self._done.wait_for(lambda: self._pending == 0)
            self._error = None

    def close(self) -> None:
        """Ends the thread after the work queued so far. On an accelerator the caller's stream waits for it: memory that
        it uses may be given on from here."""
        if self._stream is not None:
            self._computation.wait_stream(self._stream)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        self.ledger.runs_aside()
        while (entry := self._queue.get()) is not None:
            work, name, submitted, ticket = entry
            if self.ledger.recording:
                self.ledger.add(Span(self.ledger.step, "queue", name, submitted, time.time() - submitted, 0, "queue"))
            error: BaseException | None = None
            if self._error is None:
                try:
                    work()
                except BaseException as caught:  # handed to the trainer's thread, which raises it in `wait`
                    error = caught
            with self._done:
                self._error = ticket.error = self._error or error
                self._pending -= 1
                ticket.done = True
                self._done.notify_all()
            del entry, work, ticket  # the work may hold the last reference to large tensors

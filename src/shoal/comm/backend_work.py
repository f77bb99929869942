"""Works of torch.distributed: calls that run in order, in a thread of their own where nobody waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from shoal.comm.turns import Turns


class Pending(dist.Work):
    """A call that is under way or done. torch's own work around a future would not raise the future's error."""

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future
        self.source: Callable[[], int] | None = None
        """Returns the sender's rank in the group, for a receive that is done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the call and raises RuntimeError if it failed. The timeout is the group's; `timeout` is ignored."""
        self._future.wait()
        return True

    def get_future(self) -> Future:
        return self._future

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        try:
            self._future.value()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> Any:
        return self._future.wait()

    def _source_rank(self) -> int:
        if self.source is None:
            raise RuntimeError("only a receive has a source")
        return self.source()


class Line:
    """Runs calls one after the other, in the order in which threads made them.

    A call runs in the caller's thread if the caller waits anyway, else in a thread of the line.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turns = Turns()
        self._starts: queue.SimpleQueue[tuple[Future, threading.Lock] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, call: Callable[[], object], result: Any, wait: bool) -> Pending:
        """Returns the work of `call`; its future gets `result`, or the error of `call`. With `wait`, `call` has
        returned or raised when this method does.
        """
        if wait:
            self._free_thread()
            with self._turns:
                call()
            done: Future = Future()
            done.set_result(result)
            return Pending(done)

        def body(_: Future) -> Any:
            try:
                call()
            finally:  # before the future completes
                self._turns.leave()
            return result

        start: Future = Future()
        future = start.then(body)  # C++ sees the errors of `then`, but not those of Future.set_exception
        self._free_thread()
        with self._lock:  # so that turns are asked for in the order of the queue
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._starts.put((start, self._turns.ask()))
        return Pending(future)

    def close(self) -> None:
        """Waits until the calls under way have finished or failed, and ends the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._starts.put(None)
        if thread is not None:
            thread.join()

    def _free_thread(self) -> None:
        """Starts another thread for the line if this one is its thread: what a future calls then (DDP's PowerSGD hook)
        may wait for a later call.
        """
        if self._thread is not None and self._thread is threading.current_thread():
            with self._lock:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while self._thread is threading.current_thread() and (entry := self._starts.get()) is not None:
            start, turn = entry
            self._turns.take(turn)
            start.set_result(None)
            del start, entry  # do not hold the call's tensors until the next call

"""Works of torch.distributed: calls that run in order, in a thread where nobody waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future


class Pending(dist.Work):
    """A call that is under way or done. torch's own work around a future would not raise the future's error."""

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError if the call failed. The group's timeout is that of the call; a shorter one is not kept here."""
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


class Line:
    """Runs calls one after the other, in a thread that the first one which nobody waits for starts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._starts: queue.SimpleQueue[Future | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unfinished = 0
        self._lock = threading.Lock()

    def run(self, call: Callable[[], object], result: Any, wait: bool) -> dist.Work:
        """The work whose future gets `result`, or the error of `call`. With `wait` it runs right here if nothing is under way."""
        start: Future = Future()
        with self._lock:
            here = wait and self._unfinished == 0
            self._unfinished += not here
        if here:
            call()
            start.set_result(result)
            return Pending(start)

        def body(_: Future) -> Any:
            try:
                call()
            finally:  # before the caller hears of it, who may go on with a call that runs at once
                with self._lock:
                    self._unfinished -= 1
            return result

        future = start.then(body)  # whose errors C++ sees too, as it does not those of Future.set_exception
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._starts.put(start)
        return Pending(future)

    def close(self) -> None:
        """Returns when what is under way has been done or has failed."""
        if self._thread is not None:
            self._starts.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (start := self._starts.get()) is not None:
            start.set_result(None)
            del start  # its tensors are not held until the next call

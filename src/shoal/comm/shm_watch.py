"""Watches, between waits in shared memory, whether the awaited rank still lives."""

from __future__ import annotations

import ctypes
import threading

from shoal.comm.processes import has_ended

LEFT, FAILED = -1, -2
"""Reasons why a rank stopped. A reason of 1 + r says that it gave up waiting for rank r."""

Look = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))
"""The type `shoal_look` of native/shm.h."""


class Watch:
    """Checks, between waits, whether the awaited rank still lives.

    - `pids`: process ids in rank order
    - `timeout`: seconds to wait for a rank that lives

    `ended`: why no operation is possible any more, or "".
    """

    def __init__(self, pids: list[int], timeout: float) -> None:
        self._pids, self._timeout = pids, timeout
        self._threads = threading.local()
        self.ended = ""

    def look(self, late: int, waited_ns: int, stopped: int, go_on: ctypes.Array[ctypes.c_int64]) -> None:
        """Sets `go_on[0]` to 1 to wait on. Called from C, which passes no exception on: `given_up` has it."""
        message = self._reason(late, waited_ns / 1e9, stopped)
        if message:
            self._threads.given_up = RuntimeError(message), stopped if stopped > 0 else 1 + late
        else:
            go_on[0] = 1

    def given_up(self) -> tuple[BaseException, int]:
        """Returns the error of this thread's last wait, and the reason to tell other ranks: the first missing rank.

        If `look` did not return, the handler of a signal raised; ctypes has printed its exception.
        """
        return self._threads.__dict__.pop("given_up", (KeyboardInterrupt(), FAILED))

    def _reason(self, late: int, waited: float, stopped: int) -> str:
        if self.ended:
            return self.ended
        if has_ended(self._pids[late]):
            return f"the process of the group's rank {late} has ended"
        if stopped == LEFT:
            return f"the group's rank {late} has closed the group"
        if stopped:
            return f"the group's rank {late} has failed" + (
                f": it waited in vain for rank {stopped - 1}" if stopped > 0 else ""
            )
        if waited > self._timeout:
            return f"waited for the group's rank {late} until the timeout of {self._timeout:g} s was over"
        return ""

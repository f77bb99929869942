"""A carrier through shared memory, which only the two processes of a session can write: one call into native/pipe.c for
each record, and one for each tensor that is read."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.processes import has_ended
from shoal.comm.shm_segment import Meet, Segment, open_segment
from shoal.comm.shm_watch import Look
from shoal.elastic.records import Malformed
from shoal.native import library
from shoal.server.sessions.carriers import BODY_SECONDS, MOST_BODY, hung_up

_MOVED, _LATE, _GONE, _PARTLY = 0, -1, -2, -16  # as in native/pipe.c


class Memory:
    """One end, `rank` 0 or 1, of a pipe in `segment`. `end`: the connection by which the two met; it stays open.
    `seconds`: within which some bytes of a tensor must move."""

    name = "shared memory"

    def __init__(self, segment: Segment, rank: int, end: socket.socket, seconds: float) -> None:
        kernels = library()
        assert kernels is not None
        self._c, self._end, self._seconds = kernels, end, seconds
        self._watch = _Watch(segment.pids[1 - rank])
        look = Look(self._watch.look)
        memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
        state = ctypes.create_string_buffer(kernels.shoal_shm_view_bytes())
        kernels.shoal_pipe_open(state, memory.data_ptr(), rank, ctypes.cast(look, ctypes.c_void_p))
        self._view: _View | None = _View(ctypes.addressof(state), state, memory, look)
        self._body = ctypes.create_string_buffer(MOST_BODY)
        self._place = ctypes.addressof(self._body)

    @classmethod
    def meeting(cls, meet: Meet, rank: int, end: socket.socket, seconds: float) -> Memory | None:
        """Opens the memory of two processes that meet by `meet`; returns None, at both, where one cannot have it."""
        kernels = library()
        num_bytes = kernels.shoal_pipe_bytes() if kernels else 0
        obstacle = "" if kernels else f"rank {rank} does not have the native kernels"
        segment = open_segment(meet, rank, num_bytes, obstacle)
        return None if segment is None else cls(segment, rank, end, seconds)

    def send(self, body: bytes, tensors: Sequence[Tensor]) -> None:
        assert len(body) <= MOST_BODY, f"a body of {len(body):,} bytes"
        view, spans = self._usable(), _spans(tensors)
        self._watch.limit = self._seconds
        self._check(
            view, self._c.shoal_pipe_send(view.address, body, len(body), spans, len(spans) // 2 if spans else 0)
        )

    def receive(self, seconds: float | None) -> bytes:
        view = self._usable()
        self._watch.limit = seconds
        size = self._c.shoal_pipe_take(view.address, self._place, MOST_BODY)
        if size < 0:
            if size > _PARTLY:
                self._check(view, size)
            size = _PARTLY - size
            if size > MOST_BODY:
                raise Malformed(f"a body of {size:,} bytes; the most is {MOST_BODY:,}")
            self._watch.limit = BODY_SECONDS
            self._check(view, self._c.shoal_pipe_fill(view.address, (ctypes.c_int64 * 2)(self._place, size), 1))
        return ctypes.string_at(self._place, size)

    def fill(self, flat: Tensor) -> None:
        view, size = self._usable(), flat.nbytes
        if size:
            self._watch.limit = self._seconds
            span = (ctypes.c_int64 * 2)(flat.data_ptr(), size)
            self._check(view, self._c.shoal_pipe_fill(view.address, span, 1))

    def gone(self) -> bool:
        return hung_up(self._end)

    def end(self) -> None:
        view = self._view  # another thread may close it: the memory stays until this returns
        if view is not None:
            self._c.shoal_pipe_end(view.address)

    def close(self) -> None:
        self.end()
        self._view = None
        self._end.close()

    def _usable(self) -> _View:
        if self._view is None:
            raise ConnectionResetError("it has been closed")
        return self._view

    def _check(self, view: _View, outcome: int) -> None:
        """Raises what has ended the pipe, which is of no use then: bytes under way would be taken for the next
        message's."""
        if outcome == _MOVED:
            return
        self._c.shoal_pipe_end(view.address)
        if outcome == _GONE:
            raise ConnectionResetError("one of its ends has closed it")
        if outcome == _LATE:
            raise self._watch.given_up()
        raise Malformed("what is no message")


class _View(NamedTuple):
    """What a running call uses: it stays in the call's frame if the carrier is closed meanwhile."""

    address: int
    state: ctypes.Array[ctypes.c_char]
    memory: Tensor
    look: object


class _Watch:
    """Looks, between waits, whether the process `pid` still lives. `limit`: seconds without progress for which it is
    waited for while it lives; None: without end."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.limit: float | None = None
        self._error: BaseException | None = None

    def look(self, late: int, waited_ns: int, stopped: int, go_on: ctypes.Array[ctypes.c_int64]) -> None:
        """Sets `go_on[0]` to 1 to wait on. Called from C, which passes no exception on: `given_up` has it."""
        if has_ended(self._pid):
            self._error = ConnectionResetError("its process has ended")
        elif self.limit is not None and waited_ns / 1e9 > self.limit:
            self._error = TimeoutError()
        else:
            go_on[0] = 1

    def given_up(self) -> BaseException:
        """Returns why the last wait was given up. If `look` did not return, the handler of a signal has raised; ctypes
        has printed its exception."""
        error, self._error = self._error, None
        return error or KeyboardInterrupt()


def _spans(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_int64] | None:
    fields: list[int] = []
    for each in tensors:
        if size := each.nbytes:
            fields += each.data_ptr(), size
    return (ctypes.c_int64 * len(fields))(*fields) if fields else None

"""What carries the messages of a session: TCP, or memory that both processes share (memory.py).

A message is a body of at most MOST_BODY bytes and raw tensors, whose sizes the body tells. Tensors go in pieces, and
each of them must move within the time that a carrier is given.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from torch import Tensor

from shoal.comm.flat import as_bytes
from shoal.comm.hello import fill
from shoal.comm.sealed import HEAD, Seal
from shoal.elastic.records import Malformed

MOST_BODY = 1 << 16
PIECE_BYTES = 1 << 22
BODY_SECONDS = 5.0
"""Seconds within which a body must be complete once it has begun."""

_TOGETHER = 1 << 16  # bytes up to which a message is one call of the kernel


class Carrier(Protocol):
    """One end of a session's connection. Raises Malformed, or OSError or RuntimeError where the other end is gone or
    late."""

    name: str

    def send(self, body: bytes, tensors: Sequence[Tensor]) -> None:
        """Sends a message. `tensors`: contiguous and 1-D, on the CPU."""

    def receive(self, seconds: float | None) -> bytes:
        """Returns the body of the next message, which is waited for `seconds` at most; None: without end."""

    def fill(self, flat: Tensor) -> None:
        """Reads the next raw tensor, which must have as many bytes, into `flat`."""

    def gone(self) -> bool:
        """Returns whether the other end has hung up, without waiting; for the thread that uses it."""

    def end(self) -> None:
        """Ends both directions, from any thread; who waits at either end fails."""

    def close(self) -> None:
        """Ends it and gives back what it holds. No other thread may use it any more: numbers of sockets come again."""


class Stream:
    """A carrier over the connected socket `end`: bodies are sealed frames, tensors follow unsigned. `seconds`: within
    which a piece must move."""

    name = "tcp"

    def __init__(self, end: socket.socket, out: Seal, into: Seal, seconds: float) -> None:
        self._end, self._out, self._in, self._seconds = end, out, into, seconds
        self.key = out.key

    def send(self, body: bytes, tensors: Sequence[Tensor]) -> None:
        assert len(body) <= MOST_BODY, f"a body of {len(body):,} bytes"
        self._end.settimeout(self._seconds)
        frame = self._out.put(body)
        if len(frame) + sum(each.nbytes for each in tensors) <= _TOGETHER:
            self._end.sendall(b"".join([frame, *(bytes_of(each) for each in tensors)]))
            return
        self._end.sendall(frame)
        for piece in _pieces(tensors):
            self._end.sendall(piece)

    def receive(self, seconds: float | None) -> bytes:
        head = bytearray(HEAD.size)
        self._end.settimeout(seconds)
        if not self._end.recv_into(head, 1):
            raise ConnectionResetError("it hung up")
        until = time.monotonic() + BODY_SECONDS
        fill(self._end, memoryview(head)[1:], until)
        size, number, proof = HEAD.unpack(head)
        if size > MOST_BODY:
            raise Malformed(f"a body of {size:,} bytes; the most is {MOST_BODY:,}")
        body = bytearray(size)
        fill(self._end, memoryview(body), until)
        if not self._in.holds(number, proof, bytes(body)):
            raise Malformed("a frame that is not signed, or comes again")
        return bytes(body)

    def fill(self, flat: Tensor) -> None:
        for piece in _pieces([flat]):
            fill(self._end, piece, time.monotonic() + self._seconds)

    def gone(self) -> bool:
        return hung_up(self._end)

    def end(self) -> None:
        with suppress(OSError):  # the other end has closed it already
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._end.close()


def bytes_of(flat: Tensor) -> memoryview:
    """Returns the bytes of a contiguous 1-D tensor, to be read and written."""
    return as_bytes(flat).numpy().data


def hung_up(end: socket.socket) -> bool:
    """Returns whether the other side of a connection has closed it; it reads nothing, and leaves no time-out."""
    end.setblocking(False)
    try:
        return not end.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _cut(flat: Tensor) -> Iterator[Tensor]:
    return iter(as_bytes(flat).split(PIECE_BYTES)) if flat.numel() else iter(())


def _pieces(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    return (bytes_of(piece) for tensor in tensors for piece in _cut(tensor))

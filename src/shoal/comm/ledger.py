"""The ledger of one rank: what was communicated, how much, when. Counts are always kept, spans only while `recording`."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One piece of work on a lane ("compute" or "comm"); `start` in seconds since the epoch, `payload` in bytes of tensors."""

    step: int
    lane: str
    name: str
    start: float
    seconds: float
    payload: int


class Ledger:
    """Calls and payload bytes by (group, operation), and spans of the recorded steps. Safe to use from the lane's thread."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.payload: Counter[tuple[str, str]] = Counter()
        self.recording = False
        self.step = 0
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def count(self, group: str, operation: str, payload: int) -> None:
        """Books one call of `operation` on `group` with `payload` bytes of tensor data."""
        with self._lock:
            self.calls[group, operation] += 1
            self.payload[group, operation] += payload

    @contextmanager
    def span(self, lane: str, name: str, payload: int = 0) -> Iterator[None]:
        """Times the block while recording; costs nothing otherwise. The time is the host's: on CUDA that of the launch."""
        if not self.recording:
            yield
            return
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            span = Span(self.step, lane, name, start, time.perf_counter() - clock, payload)
            with self._lock:
                self._spans.append(span)

    def take(self) -> list[Span]:
        """The spans recorded since the last call, in order of their end."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

"""The ledger of one rank: what was communicated, how much, when. Counts are always kept, spans only while `recording`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

Phase = Literal["queue", "wait", "transfer", "encode", "decode", "compute"]
"""What a span's time went into: lying in a lane's queue, waiting for a lane, talking, encoding, decoding, or none of these."""


@dataclass(frozen=True)
class Span:
    """One piece of work on a lane; `start` in seconds since the epoch, `payload` in bytes of tensors.

    Lanes: "compute" is the trainer's thread, "comm" the communication. The spans of "queue" (one a piece of queued work, so they
    overlap) and of "wait" (the trainer waits for the communication) are not work; they stand on lanes of their own.
    """

    step: int
    lane: str
    name: str
    start: float
    seconds: float
    payload: int
    phase: Phase = "compute"


class Flow(NamedTuple):
    """What traffic is booked under. `purpose` is a class of purposes: "gradients 7" is booked under "gradients"."""

    group: str
    operation: str
    purpose: str


@dataclass(frozen=True)
class Traffic:
    """`payload`: bytes of the tensor that is reduced, gathered into, split or copied. `wire`: bytes that this rank hands to others."""

    calls: int = 0
    payload: int = 0
    wire: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.payload + other.payload, self.wire + other.wire)


class Ledger:
    """Traffic by (group, operation, purpose), and spans of the recorded steps. Safe to use from the lane's thread."""

    def __init__(self) -> None:
        self.recording = False
        self.step = 0
        self._booked: dict[tuple[str, str, str], list[int]] = {}  # calls, payload, wire by group, operation, whole purpose
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def count(self, group: str, operation: str, purpose: str, payload: int, wire: int) -> None:
        """Books one call: `payload` bytes of tensor data, of which this rank hands over `wire` bytes (see `transport.sent_bytes`)."""
        key = (group, operation, purpose)
        with self._lock:
            if (sums := self._booked.get(key)) is None:
                sums = self._booked[key] = [0, 0, 0]
            sums[0] += 1
            sums[1] += payload
            sums[2] += wire

    @property
    def traffic(self) -> dict[Flow, Traffic]:
        """All that was booked so far, by class of purpose."""
        with self._lock:
            booked = {key: Traffic(*sums) for key, sums in self._booked.items()}
        traffic: dict[Flow, Traffic] = {}
        for (group, operation, purpose), more in booked.items():
            flow = Flow(group, operation, _class_of(purpose))
            traffic[flow] = traffic.get(flow, Traffic()) + more
        return traffic

    def total(self, group: str | None = None, operation: str | None = None, purpose: str | None = None) -> Traffic:
        """The sum of what was booked under the given names; None means all."""
        wanted = (group, operation, purpose)
        fitting = (
            traffic
            for flow, traffic in self.traffic.items()
            if all(want is None or want == is_ for want, is_ in zip(wanted, flow, strict=True))
        )
        return sum(fitting, Traffic())

    @contextmanager
    def span(self, lane: str, name: str, payload: int = 0, phase: Phase = "compute") -> Iterator[None]:
        """Times the block while recording; costs nothing otherwise. The time is the host's: on CUDA that of the launch."""
        if not self.recording:
            yield
            return
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self.add(Span(self.step, lane, name, start, time.perf_counter() - clock, payload, phase))

    def add(self, span: Span) -> None:
        """Keeps a span that was timed elsewhere."""
        with self._lock:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """The spans recorded since the last call, in order of their end."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


def _class_of(purpose: str) -> str:
    """ "gradients 7" -> "gradients": what is numbered is one class."""
    words = purpose.split()
    return " ".join(words[:-1]) if len(words) > 1 and words[-1].isdigit() else purpose

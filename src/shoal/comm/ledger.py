"""The ledger of one rank: what was communicated, how much and when.

Counts are always kept; spans and memory levels only while `recording`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from shoal.device import CPU, Event, timed_event

Phase = Literal["queue", "wait", "transfer", "encode", "decode", "compute"]
"""Where a span's time went: queued, waiting for a lane, transferring, encoding, decoding, or none of these."""


SHORTEST_STALL = 1e-5
"""Seconds. A shorter wait only checked whether there is something to wait for, and is not recorded."""


class Peers(NamedTuple):
    """The group of a call: its name, its first and last rank, and how many it has."""

    name: str = ""
    first: int = 0
    last: int = 0
    size: int = 1


NOBODY = Peers()


@dataclass(frozen=True)
class Span:
    """One piece of work on a lane; `start` in seconds since the epoch, `payload` in bytes of tensors.

    Lanes: "compute" is the trainer's thread, "comm" the communication. Spans of "queue" (one for each piece of queued
    work, so they overlap) and of "wait" (the trainer waits for what `name` says) are no work; they have lanes of their
    own. Of a call of a group there are the `operation` and the `peers`. `aside`: it went on beside the trainer's thread
    (on an accelerator, its stream).
    """

    step: int
    lane: str
    name: str
    start: float
    seconds: float
    payload: int
    phase: Phase = "compute"
    operation: str = ""
    peers: Peers = NOBODY
    aside: bool = False


class Level(NamedTuple):
    """From time `at` (seconds since the epoch) on, `role` occupies `nbytes` of the memory `tier`."""

    step: int
    at: float
    tier: str
    role: str
    nbytes: int


class Flow(NamedTuple):
    """The key under which traffic is booked. `purpose` is a class: "gradients 7" is booked under "gradients"."""

    group: str
    operation: str
    purpose: str


@dataclass(frozen=True)
class Traffic:
    """Sums over calls. `payload`: bytes of tensors reduced, gathered, split or copied; `wire`: bytes sent."""

    calls: int = 0
    payload: int = 0
    wire: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.payload + other.payload, self.wire + other.wire)


class Ledger:
    """Traffic by (group, operation, purpose), and spans and levels of the recorded steps. Thread-safe.

    `watch` is called where a span begins and ends while recording, to sample what changes without notice. Spans on an
    accelerator, `device`, are timed by its clock, on the stream that is current in the block; `_zero` is a moment on
    both clocks.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device
        self._zero: tuple[float, Event | None] = (0.0, None)
        self._timed: list[tuple[Span, Event, Event]] = []
        self.recording = False
        self.step = 0
        # [calls, payload, wire] by (group, operation, whole purpose)
        self._booked: dict[tuple[str, str, str], list[int]] = {}
        self._spans: list[Span] = []
        self._levels: list[Level] = []
        self._aside = threading.local()
        self.watch: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def count(self, group: str, operation: str, purpose: str, payload: int, wire: int) -> None:
        """Books one call: `payload` bytes of tensors, of which this rank sends `wire` (see `transport.sent_bytes`)."""
        key = (group, operation, purpose)
        with self._lock:
            if (sums := self._booked.get(key)) is None:
                sums = self._booked[key] = [0, 0, 0]
            sums[0] += 1
            sums[1] += payload
            sums[2] += wire

    @property
    def traffic(self) -> dict[Flow, Traffic]:
        """All traffic booked so far, by class of purpose."""
        with self._lock:
            booked = {key: Traffic(*sums) for key, sums in self._booked.items()}
        traffic: dict[Flow, Traffic] = {}
        for (group, operation, purpose), more in booked.items():
            flow = Flow(group, operation, class_of(purpose))
            traffic[flow] = traffic.get(flow, Traffic()) + more
        return traffic

    def total(self, group: str | None = None, operation: str | None = None, purpose: str | None = None) -> Traffic:
        """Sums the traffic booked under the given names; None matches all."""
        wanted = (group, operation, purpose)
        fitting = (
            traffic
            for flow, traffic in self.traffic.items()
            if all(want is None or want == is_ for want, is_ in zip(wanted, flow, strict=True))
        )
        return sum(fitting, Traffic())

    @contextmanager
    def span(
        self, lane: str, name: str, payload: int = 0, phase: Phase = "compute", operation: str = "",
        peers: Peers = NOBODY,
    ) -> Iterator[None]:  # fmt: skip
        """Times the block while recording; costs nothing otherwise."""
        if not self.recording:
            yield
            return
        if self.watch is not None:
            self.watch()
        before = self._event()
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds, aside = time.perf_counter() - clock, getattr(self._aside, "here", False)
            span = Span(self.step, lane, name, start, seconds, payload, phase, operation, peers, aside)
            after = self._event()
            if before is None or after is None:
                self.add(span)
            else:
                self._timed.append((span, before, after))
            if self.watch is not None:
                self.watch()

    def _event(self) -> Event | None:
        """Marks a moment on the accelerator's clock; the first time, both clocks are compared."""
        event = timed_event(self._device)
        if event is not None and self._zero[1] is None:
            event.synchronize()
            self._zero = time.time(), event
        return event

    def _on_device(self, span: Span, before: Event, after: Event) -> Span:
        """Returns `span` with the time that the accelerator took from `before` to `after`, for which it waits."""
        after.synchronize()
        at, zero = self._zero
        assert zero is not None
        start = at + zero.elapsed_time(before) / 1e3
        return replace(span, start=start, seconds=before.elapsed_time(after) / 1e3)

    @contextmanager
    def stall(self, cause: str) -> Iterator[None]:
        """Times a block in which the trainer's thread may wait: a span of phase "wait", unless it is over at once."""
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - clock
            self.wait(seconds)
            if self.recording and seconds >= SHORTEST_STALL and not getattr(self._aside, "here", False):
                self.add(Span(self.step, "wait", cause, start, seconds, 0, "wait"))

    @property
    def waited(self) -> float:
        """Seconds for which the calling thread has waited so far: in calls of groups, and for work beside it."""
        return getattr(self._aside, "waited", 0.0)

    def wait(self, seconds: float) -> None:
        """Notes that the calling thread has waited for others."""
        self._aside.waited = self.waited + seconds

    def runs_aside(self) -> None:
        """Marks the calling thread as one beside the trainer: when it waits, training goes on."""
        self._aside.here = True

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Marks what the calling thread gives to another stream inside the context."""
        before = getattr(self._aside, "here", False)
        self._aside.here = True
        try:
            yield
        finally:
            self._aside.here = before

    def add(self, span: Span) -> None:
        """Adds a span that was timed elsewhere."""
        with self._lock:
            self._spans.append(span)

    def note(self, tier: str, role: str, nbytes: int, at: float | None = None) -> None:
        """Records, while recording, that `role` occupies `nbytes` of `tier` now."""
        # Without the lock, since garbage collection may come here while this thread has it; append is atomic.
        if self.recording:
            self._levels.append(Level(self.step, time.time() if at is None else at, tier, role, nbytes))

    def take_levels(self) -> list[Level]:
        """Returns the levels noted since the last call."""
        levels, self._levels = self._levels, []
        return levels

    def take(self) -> list[Span]:
        """Returns the spans recorded since the last call, in the order of their ends."""
        timed, self._timed = self._timed, []
        measured = [self._on_device(*each) for each in timed]
        with self._lock:
            spans, self._spans = self._spans, []
        return sorted(spans + measured, key=lambda span: span.start + span.seconds) if measured else spans


def class_of(purpose: str) -> str:
    """Drops the number at the end: "gradients 7" becomes the class `gradients`."""
    words = purpose.split()
    return " ".join(words[:-1]) if len(words) > 1 and words[-1].isdigit() else purpose

"""A stand-in for `torch.cuda` that keeps what it is asked for, in order; tensors of its devices stay those of the
CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch


class Recorded:
    """A stream or an event of the recorder: `name`, and each call with its arguments' names."""

    def __init__(self, recorder: Recorder, name: str, device: torch.device) -> None:
        self._recorder, self.name, self.device = recorder, name, device

    def wait_stream(self, stream: Recorded) -> None:
        self._recorder.calls.append(f"{self.name} waits for {stream.name}")

    def wait_event(self, event: Recorded) -> None:
        self._recorder.calls.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Recorded:
        event = Recorded(self._recorder, f"event {len(self._recorder.events)}", self.device)
        self._recorder.events.append(event)
        self._recorder.calls.append(f"{event.name} on {self.name}")
        return event

    def synchronize(self) -> None:
        self._recorder.calls.append(f"host waits for {self.name}")

    def record(self, stream: Recorded) -> None:
        self._recorder.calls.append(f"{self.name} on {stream.name}")

    def elapsed_time(self, end: Recorded) -> float:
        """A second for each event from one to the other."""
        return 1000.0 * (self._recorder.events.index(end) - self._recorder.events.index(self))


class Recorder:
    """Two devices with 8 GB each; the second one is current."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events: list[Recorded] = []
        self.default_generators = (torch.Generator(), torch.Generator())
        self.is_there = True
        self.stats: dict[str, int] = {}
        self._streams = 0
        self._current: Recorded | None = None

    def is_available(self) -> bool:
        return self.is_there

    is_initialized = is_available

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 1

    def set_device(self, device: torch.device) -> None:
        self.calls.append(f"set {device}")

    def Stream(self, device: torch.device) -> Recorded:
        self._streams += 1
        return Recorded(self, f"stream {self._streams}", device)

    def Event(self, enable_timing: bool) -> Recorded:
        assert enable_timing
        self.events.append(Recorded(self, f"event {len(self.events)}", torch.device("cpu")))
        return self.events[-1]

    @contextmanager
    def stream(self, stream: Recorded) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def current_stream(self, device: torch.device | None = None) -> Recorded:
        return self._current or Recorded(self, "main", device or torch.device("cpu"))

    def synchronize(self, device: torch.device) -> None:
        self.calls.append(f"host waits for {device}")

    def memory_allocated(self, device: torch.device) -> int:
        return 100

    def max_memory_allocated(self, device: torch.device) -> int:
        return 200

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return self.stats

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.calls.append(f"peak of {device} forgotten")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 300, 8_000_000_000

    def get_device_name(self, device: torch.device) -> str:
        return "Recorder"

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name="Recorder", total_memory=8_000_000_000, uuid=f"GPU-{device.index}")

    def get_device_capability(self, device: torch.device) -> tuple[int, int]:
        return 8, 0

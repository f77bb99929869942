"""What carries out a kind of device: torch's module for it (`torch.cuda`, `torch.xpu`), or what stands in for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

KINDS = ("cuda",)
"""Kinds of accelerator that ranks take unasked, the first of which there is one; others are taken where they are
named."""


class Event(Protocol):
    """A point in the work of a stream, as `torch.Event`."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class Stream(Protocol):
    """A queue of an accelerator's work, as `torch.Stream`: each piece begins when the one before it has ended."""

    @property
    def device(self) -> torch.device: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> Any: ...
    def synchronize(self) -> None: ...


class Backend(Protocol):
    """What this room asks of torch's module for a kind of accelerator; torch's own documentation of `torch.cuda` is the
    contract.

    Not `torch.accelerator`, which knows one kind a process and none beside the CPU's build.
    """

    default_generators: Sequence[torch.Generator]

    def is_available(self) -> bool: ...
    def is_initialized(self) -> bool: ...
    def device_count(self) -> int: ...
    def current_device(self) -> int: ...
    def set_device(self, device: torch.device) -> None: ...
    def Stream(self, device: torch.device) -> Any: ...
    def Event(self, enable_timing: bool) -> Any: ...
    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...
    def current_stream(self, device: torch.device | None = None) -> Any: ...
    def synchronize(self, device: torch.device) -> None: ...
    def memory_allocated(self, device: torch.device) -> int: ...
    def max_memory_allocated(self, device: torch.device) -> int: ...
    def memory_stats(self, device: torch.device) -> Mapping[str, Any]: ...
    def reset_peak_memory_stats(self, device: torch.device) -> None: ...
    def mem_get_info(self, device: torch.device) -> tuple[int, int]: ...
    def get_device_name(self, device: torch.device) -> str: ...
    def get_device_properties(self, device: torch.device) -> Any: ...
    def get_device_capability(self, device: torch.device) -> tuple[int, int]: ...


_backends: dict[str, Any] = {"cpu": None, "meta": None, **{kind: torch.get_device_module(kind) for kind in KINDS}}


def backend(device: torch.device) -> Backend | None:
    """What carries out `device`'s kind; None where the host itself does (the CPU) or nobody (meta tensors)."""
    if device.type not in _backends:
        _backends[device.type] = torch.get_device_module(device)
    found: Backend | None = _backends[device.type]
    return found


def backends() -> list[Backend]:
    """Returns the backends of the accelerators known so far."""
    return [each for each in _backends.values() if each is not None]


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` works beside the host, which queues work and goes on; the CPU does not."""
    return backend(device) is not None


@contextmanager
def stand_in(kind: str, module: Backend | None) -> Iterator[None]:
    """Inside, `module` carries out devices of type `kind`, and so records or simulates what they are asked for."""
    before = backend(torch.device(kind))
    _backends[kind] = module
    try:
        yield
    finally:
        _backends[kind] = before

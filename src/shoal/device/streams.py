"""The order of an accelerator's work: streams, and who waits for whom. The CPU has none: its work has ended when the
call returns.

A stream is None there. The allocator of an accelerator gives a tensor's memory on as soon as the tensor is gone, in the
order of the stream that made it: whoever uses a tensor on another stream says so by `record_use`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from shoal.device.backend import Event, Stream, backend, backends


def new_stream(device: torch.device) -> Stream | None:
    """A stream of `device` beside the current one."""
    module = backend(device)
    return None if module is None else module.Stream(device)


def current_stream(device: torch.device) -> Stream | None:
    """The stream to which this thread gives work for `device`."""
    module = backend(device)
    return None if module is None else module.current_stream(device)


def on_stream(stream: Stream | None) -> AbstractContextManager[Any]:
    """Makes `stream` the current one inside."""
    module = None if stream is None else backend(stream.device)
    return nullcontext() if module is None else module.stream(stream)


def record_event(device: torch.device) -> Event | None:
    """An event behind the work that the current stream of `device` has now."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


def timed_event(device: torch.device) -> Event | None:
    """An event as `record_event` makes, which keeps the device's time: see `Event.elapsed_time`, in milliseconds."""
    module = backend(device)
    if module is None:
        return None
    event: Any = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return cast(Event, event)


@contextmanager
def aside(device: torch.device, after: Event | None) -> Iterator[None]:
    """Runs what is launched inside on a stream of its own, behind the event `after`; returns when `device` has done
    it. For a thread beside the trainer's, of which `device` becomes the current one."""
    module, stream = backend(device), new_stream(device)  # from torch's pool of streams: nothing is made
    if module is None or stream is None:
        yield
        return
    module.set_device(device)  # a thread begins with the first, which would get a context of this process
    with on_stream(stream):
        stream.wait_event(after)
        yield
    stream.synchronize()


def record_use(*tensors: Tensor) -> None:
    """Keeps the memory of `tensors` from others until the current stream has done what it was given up to now."""
    for tensor in tensors:
        stream: Any = current_stream(tensor.device)
        if stream is not None:
            tensor.record_stream(stream)


def finish(device: torch.device) -> None:
    """Waits, on the host, for the current stream of `device`."""
    stream = current_stream(device)
    if stream is not None:
        stream.synchronize()


def finish_all() -> None:
    """Waits, on the host, for the current stream of each kind of accelerator that is in use."""
    for module in backends():
        if module.is_initialized():
            module.current_stream().synchronize()


def synchronize(device: torch.device) -> None:
    """Waits, on the host, for all streams of `device`."""
    module = backend(device)
    if module is not None:
        module.synchronize(device)

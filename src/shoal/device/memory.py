"""An accelerator's memory in figures, and the way from the host's to it. Figures are bytes; None of a CPU, whose memory
is the host's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.device.backend import Event, backend
from shoal.device.streams import record_event


def allocated(device: torch.device) -> int | None:
    """In tensors now, by torch's allocator."""
    module = backend(device)
    return None if module is None else module.memory_allocated(device)


_most: dict[torch.device, int] = {}
"""The most that was allocated on a device before its allocator began anew."""


def most_allocated(device: torch.device) -> int | None:
    """The most of `allocated` since the start, or since `forget_most_allocated`."""
    module = backend(device)
    return None if module is None else max(_most.get(_with_index(device), 0), module.max_memory_allocated(device))


def forget_most_allocated(device: torch.device) -> None:
    """Begins `most_allocated` anew, with what is allocated now."""
    module = backend(device)
    if module is not None:
        module.reset_peak_memory_stats(device)
        _most.pop(_with_index(device), None)


def begin_most_asked_for(device: torch.device) -> tuple[int, int] | None:
    """Returns `asked_for`, and begins its most anew, with what is allocated now. `most_allocated` goes on."""
    module = backend(device)
    if module is None:
        return None
    stats, key = module.memory_stats(device), _with_index(device)
    _most[key] = max(_most.get(key, 0), stats.get("allocated_bytes.all.peak", 0))
    module.reset_peak_memory_stats(device)
    return _asked_for(stats)


def _with_index(device: torch.device) -> torch.device:
    module = backend(device)
    return device if module is None or device.index is not None else torch.device(device.type, module.current_device())


def asked_for(device: torch.device) -> tuple[int, int] | None:
    """In tensors now, and the most since `begin_most_asked_for` or `forget_most_allocated`, without what torch's
    allocator rounds up, where its module tells them apart."""
    module = backend(device)
    return None if module is None else _asked_for(module.memory_stats(device))


def _asked_for(stats: Mapping[str, int]) -> tuple[int, int]:
    kind = "requested_bytes" if "requested_bytes.all.peak" in stats else "allocated_bytes"
    return stats.get(f"{kind}.all.current", 0), stats.get(f"{kind}.all.peak", 0)


def free_memory(device: torch.device) -> int | None:
    """What no process has taken."""
    module = backend(device)
    return None if module is None else module.mem_get_info(device)[0]


def total_memory(device: torch.device) -> int | None:
    """What the device has."""
    module = backend(device)
    return None if module is None else int(module.get_device_properties(device).total_memory)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; from the host to an accelerator by way of pinned memory, so that the host does not wait."""
    if tensor.is_cpu and backend(device) is not None:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> tuple[list[Tensor], list[Event]]:
    """`tensors` in the host's memory, and the events after which they are there; the host does not wait here, and who
    waits for the events waits for nothing that is launched later. On a CPU they are there already."""
    here, devices = list(tensors), set[torch.device]()
    for index, tensor in enumerate(tensors):
        if backend(tensor.device) is not None:
            here[index] = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            devices.add(tensor.device)
    return here, [event for device in devices if (event := record_event(device)) is not None]

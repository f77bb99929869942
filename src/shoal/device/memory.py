"""An accelerator's memory in figures, and the way from the host's to it. Figures are bytes; None of a CPU, whose memory
is the host's."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.device.backend import backend


def allocated(device: torch.device) -> int | None:
    """In tensors now, by torch's allocator."""
    module = backend(device)
    return None if module is None else module.memory_allocated(device)


def most_allocated(device: torch.device) -> int | None:
    """The most of `allocated` since the start, or since `forget_most_allocated`."""
    module = backend(device)
    return None if module is None else module.max_memory_allocated(device)


def forget_most_allocated(device: torch.device) -> None:
    """Begins `most_allocated` anew, with what is allocated now."""
    module = backend(device)
    if module is not None:
        module.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> int | None:
    """What no process has taken."""
    module = backend(device)
    return None if module is None else module.mem_get_info(device)[0]


def total_memory(device: torch.device) -> int | None:
    """What the device has."""
    module = backend(device)
    return None if module is None else int(module.get_device_properties(device).total_memory)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The host's `tensor` on `device`, by way of pinned memory, so that the host does not wait; on a CPU `tensor`
    itself."""
    return tensor if backend(device) is None else tensor.pin_memory().to(device, non_blocking=True)

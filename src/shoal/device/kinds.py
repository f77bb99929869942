"""Which device a rank has, and what that is called."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.device.backend import KINDS, backend
from shoal.device.settings import choose_allocator
from shoal.errors import ArgumentError, UserError

CPU = torch.device("cpu")

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable with the numbers of the accelerators that a process sees."""
WITHOUT_ACCELERATORS = {VISIBLE: ""}
"""Environment of a process that is to see none."""


def accelerators() -> list[torch.device]:
    """The accelerators of this host that ranks may take unasked, all of one kind."""
    for kind in KINDS:
        module = backend(torch.device(kind))
        if module is not None and module.is_available():
            return [torch.device(kind, index) for index in range(module.device_count())]
    return []


def why_no_accelerator() -> str:
    """Says why `accelerators` is empty."""
    built = torch.version.cuda
    return "torch is built without CUDA" if built is None else f"torch is built for CUDA {built} but finds no GPU"


def any_device() -> torch.device:
    """The accelerator that is current in this process, without its index; the CPU where there is none."""
    return next((torch.device(each.type) for each in accelerators()), CPU)


def own_device(asked: torch.device | str | None, local_rank: int, size: int) -> torch.device:
    """The device of the `local_rank`-th rank of this host, one of `size` in all, with its index; it becomes the
    thread's current one.

    `asked`: None for the rank's own accelerator, or the CPU of a host without. UserError where there is no such device,
    or ranks outnumber accelerators.
    """
    device = any_device() if asked is None else _parsed(asked)
    module = backend(device)
    if module is None:
        return device
    count, index = module.device_count() if module.is_available() else 0, device.index
    if index is None and asked is not None and size == 1 and count > 0:
        index = module.current_device()
    elif index is None:
        # One that a starter has left to this process alone; if all of them have the same, they are told as they meet.
        is_only = count == 1 and "," not in os.environ.get(VISIBLE, ",")
        index = 0 if is_only else local_rank
    if index >= count:
        raise UserError(_no_such(device, local_rank, count))
    device = torch.device(device.type, index)
    choose_allocator(device)
    module.set_device(device)
    return device


def _parsed(asked: torch.device | str) -> torch.device:
    try:
        device = torch.device(asked)
        backend(device)
    except RuntimeError as error:
        said = f' = "{asked}": {str(error).splitlines()[0]}. "cpu" and "cuda" are devices'
        raise ArgumentError("device", said) from error
    return device


def _no_such(device: torch.device, local_rank: int, count: int) -> str:
    """Says that a rank's `device` is not among the `count` that its process sees."""
    if count == 0:
        why = why_no_accelerator() if device.type in KINDS else f"torch finds no device of type {device.type}"
        return f'device = "{device}": {why}. Train on the CPU: device = "cpu"'
    visible = os.environ.get(VISIBLE)
    seen = f"there are {count}" + (f" ({VISIBLE}={visible})" if visible else "")
    what = f"rank {local_rank} of this host has no GPU of its own" if device.index is None else f"there is no {device}"
    return f"{what}: {seen}. Start at most one rank a GPU, or hide the GPUs ({VISIBLE}=) to train on the CPU"


def kind_of(device: torch.device) -> str:
    """The type of an accelerator; "cpu" of whatever the host has, meta tensors too."""
    return CPU.type if backend(device) is None else device.type


def moving_calls() -> list[str]:
    """The calls that move a module in torch, as users write them: `.to()`, and one for each kind of accelerator."""
    return [".to()", *(f".{kind}()" for kind in KINDS)]


def group_backend(device: torch.device) -> str | None:
    """torch.distributed's backend for groups whose tensors are on `device`: "gloo", "nccl" and the like; None where
    there is none."""
    return dist.Backend.default_device_backend_map.get(device.type)


def hardware_name(device: torch.device) -> str | None:
    """What the accelerator calls itself; None of a CPU."""
    module = backend(device)
    return None if module is None else module.get_device_name(device)


def processor_name() -> str:
    """What the host's processor calls itself, or else its architecture."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        for name in (line.partition(":")[2].strip() for line in lines if line.startswith("model name")):
            return name
    return platform.processor() or platform.machine()


def is_own_failure(error: BaseException) -> bool:
    """Whether `error` says that an accelerator of this process, or a kernel on it, has failed: no later call to it
    succeeds."""
    return isinstance(error, torch.AcceleratorError)


def hardware_id(device: torch.device) -> str | None:
    """What tells the accelerator from all others, also those of other hosts; None of a CPU, and of one that does not
    say."""
    module = backend(device)
    found = None if module is None else getattr(module.get_device_properties(device), "uuid", None)
    return None if found is None else str(found)

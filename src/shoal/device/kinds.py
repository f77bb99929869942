"""Which device a rank has, and what that is called."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.device.backend import KINDS, backend
from shoal.errors import UserError

CPU = torch.device("cpu")

WITHOUT_ACCELERATORS = {"CUDA_VISIBLE_DEVICES": ""}
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

    `asked`: None for the rank's own accelerator, or the CPU of a host without. UserError where ranks outnumber
    accelerators.
    """
    device = torch.device(asked) if asked is not None else _unasked(local_rank)
    module = backend(device)
    if module is None:
        return device
    if device.index is None:
        device = torch.device(device.type, local_rank if size > 1 else module.current_device())
    module.set_device(device)
    return device


def _unasked(local_rank: int) -> torch.device:
    found = accelerators()
    if not found:
        return CPU
    if local_rank >= len(found):
        raise UserError(
            f"rank {local_rank} of this host has no GPU of its own: there are {len(found)}. Start at most one rank a "
            "GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )
    return found[local_rank]


def kind_of(device: torch.device) -> str:
    """The type of an accelerator; "cpu" of whatever the host has, meta tensors too."""
    return CPU.type if backend(device) is None else device.type


def moving_calls() -> list[str]:
    """The calls that move a module in torch, as users write them: `.to()`, and one for each kind of accelerator."""
    return [".to()", *(f".{kind}()" for kind in KINDS)]


def group_backend(device: torch.device) -> str:
    """torch.distributed's backend for groups whose tensors are on `device`: "gloo", "nccl" and the like."""
    return str(dist.get_default_backend_for_device(device))


def hardware_name(device: torch.device) -> str | None:
    """What the accelerator calls itself; None of a CPU."""
    module = backend(device)
    return None if module is None else module.get_device_name(device)

"""How torch's allocator of accelerators is set, in this process."""

from __future__ import annotations

import os

import torch

from shoal.device.backend import KINDS, backend

ALLOCATOR = "expandable_segments:True"
"""Segments that grow: tensors whose sizes change from step to step leave no holes that none of them fits."""
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch reads the settings when it allocates first, the one that counts first."""


def choose_allocator(device: torch.device) -> None:
    """Sets the allocator of `device` as Shoal wants it, where the user has not, and nothing has been allocated yet."""
    module = backend(device)
    chosen = any(name in os.environ for name in VARIABLES)
    if module is not None and device.type in KINDS and not chosen and not module.is_initialized():
        os.environ[VARIABLES[-1]] = ALLOCATOR


def allocator(device: torch.device) -> str | None:
    """The settings in force, as torch writes them, or "torch's own settings"; None of a CPU."""
    if backend(device) is None:
        return None
    return next((os.environ[name] for name in VARIABLES if name in os.environ), "torch's own settings")

"""The state of torch's random generators: the host's, and a device's own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from shoal.device.backend import backend, is_accelerator


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the host's generator and that of `device`."""
    # Not torch.manual_seed: without CUDA that keeps a stack trace for each call.
    torch.default_generator.manual_seed(seed)
    module = backend(device)
    if module is not None:
        module.default_generators[device.index].manual_seed(seed)


def keep_generators(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Gives the host's generator and those of `devices`, all of one kind, back the state that they have now when the
    block ends."""
    beside = [each for each in devices if is_accelerator(each)]
    kind = {"device_type": beside[0].type} if beside else {}
    return torch.random.fork_rng(beside, **kind)

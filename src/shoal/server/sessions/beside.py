"""What carries a session's tensors from one accelerator to another: a process group of its two ends, beside the carrier
of its records. So they go by NCCL, and not through the memory of the hosts."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.connect import DEVICE_TIMEOUT, this_host
from shoal.comm.device_group import DeviceGroup
from shoal.comm.nccl import Nccl
from shoal.comm.signed import SignedStore
from shoal.device import group_backend, hardware_id, is_accelerator, own_device, record_event, record_use

_BRISK_SECONDS, _REST_SECONDS = 2e-4, 1e-4  # for which the host looks without rest; between looks after that


class Beside:
    """One end, `rank` 0 or 1, of a group of two on `device`. `seconds`: within which a tensor must have come, or gone.

    A call returns when the device has done it: an end that has died is noticed, and the host never counts on numbers
    that have not come. The peer must have been told of each tensor before it is sent.
    """

    def __init__(self, store: dist.Store, key: bytes, rank: int, device: torch.device, seconds: float) -> None:
        self.device, self._rank, self._seconds = device, rank, seconds
        self._signed = SignedStore(store, key)  # kept here, since a PrefixStore does not keep it alive
        kind = Nccl if group_backend(device) == dist.Backend.NCCL else DeviceGroup
        own = dist.PrefixStore(f"session/{key.hex()[:16]}", self._signed)
        self._group = kind.open(own, rank, 2, device, max(DEVICE_TIMEOUT, timedelta(seconds=2 * seconds)))
        self._ended = False

    def send(self, flat: Tensor) -> None:
        """Sends `flat` behind the work of the current stream. Raises TimeoutError."""
        self._group.send(flat, 1 - self._rank)
        self._finish(flat)

    def fill(self, flat: Tensor) -> None:
        """Reads the next tensor into `flat`. Raises TimeoutError."""
        self._group.recv(flat, 1 - self._rank)
        self._finish(flat)

    def end(self) -> None:
        """Gives up what is under way, from any thread."""
        if not self._ended:
            self._ended = True
            self._group.abort()

    def _finish(self, flat: Tensor) -> None:
        record_use(flat)
        event: Any = record_event(self.device)
        began = time.monotonic()
        while event is not None and not event.query():
            waited = time.monotonic() - began
            if self._ended:
                raise ConnectionResetError("one of its ends has closed it")
            if waited > self._seconds:
                self.end()
                raise TimeoutError
            if waited > _BRISK_SECONDS:
                time.sleep(_REST_SECONDS)


def accelerator(asked: torch.device | str | None) -> torch.device | None:
    """Returns the accelerator that a user has named, with its index, the current one of its kind where it has none; it
    becomes this thread's. None for the CPU. Raises UserError where there is no such device."""
    if asked is None:
        return None
    found = own_device(asked, 0, 1)
    return found if is_accelerator(found) else None


def told(device: torch.device | None) -> str:
    """Returns what an end tells the other one of its accelerator: the kind, and which one it is; "" for none over which
    torch has a group."""
    if device is None or not is_accelerator(device) or group_backend(device) in (None, "gloo"):
        return ""
    return f"{device.type} {hardware_id(device) or f'{this_host()}/{device.index}'}"


def fit(one: str, other: str) -> bool:
    """Returns whether two ends that tell this can have a group: of one kind, and not one and the same, which NCCL
    refuses."""
    return bool(one and other) and one.split()[0] == other.split()[0] and one != other

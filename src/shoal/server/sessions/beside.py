"""What carries a session's tensors from one accelerator to another: a process group of its two ends, beside the carrier
of its records. So they go by NCCL, and not through the memory of the hosts.

They go on a stream of their own: an end that sends nothing holds up no work of others on the device. No call of the
group, which may block on the host where the other end has died, keeps a thread that serves: they are made and given up
in threads that may be left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.connect import DEVICE_TIMEOUT, this_host
from shoal.comm.device_group import DeviceGroup
from shoal.comm.nccl import Nccl
from shoal.comm.signed import SignedStore
from shoal.device import (
    group_backend,
    hardware_id,
    is_accelerator,
    new_stream,
    on_stream,
    own_device,
    record_event,
    record_use,
)

PIECE_BYTES = 1 << 26
"""A tensor goes in pieces of as many bytes, of which each must come within the time that an end is given."""

_BRISK_SECONDS, _REST_SECONDS = 2e-4, 1e-4  # for which the host looks without rest; between looks after that
_GONE_SECONDS = 0.1  # between looks whether the other end still lives
_ABORT_SECONDS = 5.0  # for which giving up is waited for: NCCL may hang in that, too


class Beside:
    """One end, `rank` 0 or 1, of a group of two on `device`. `seconds`: within which a piece of a tensor must have
    come, or gone. `gone()`: whether the other end has hung up.

    A call returns when the device has done it: the host never counts on numbers that have not come. The peer must have
    been told of each tensor before it is sent.
    """

    def __init__(
        self,
        store: dist.Store,
        key: bytes,
        rank: int,
        device: torch.device,
        seconds: float,
        gone: Callable[[], bool],
    ) -> None:
        self.device, self._rank, self._seconds, self._gone = device, rank, seconds, gone
        self._signed = SignedStore(store, key)  # kept here, since a PrefixStore does not keep it alive
        kind = Nccl if group_backend(device) == dist.Backend.NCCL else DeviceGroup
        own = dist.PrefixStore(f"session/{key.hex()[:16]}", self._signed)
        patience = max(DEVICE_TIMEOUT, timedelta(seconds=2 * seconds))  # this end is the first to give up
        self._group = kind.of_two(own, rank, device, patience)
        self._stream: Any = new_stream(device)
        self._meeting: threading.Thread | None = None
        self._failed: Exception | None = None
        self._ending = threading.Lock()  # taken once, for good
        self._opened = self._ended = False

    def send(self, flat: Tensor) -> None:
        """Sends `flat` behind the work of the current stream. Raises TimeoutError; ConnectionError where the other end
        is gone."""
        self._move(flat, self._group.send)

    def fill(self, flat: Tensor) -> None:
        """Reads the next tensor into `flat`. Raises what `send` does."""
        self._move(flat, self._group.recv)

    def end(self) -> None:
        """Gives up what is under way, from any thread."""
        if self._ending.acquire(blocking=False):
            self._ended = True
            meeting = self._meeting
            giving_up = threading.Thread(target=self._give_up, args=(meeting,), name="shoal-beside-end", daemon=True)
            with suppress(RuntimeError):  # Python ends, which starts no thread any more: so does the group
                giving_up.start()
                if meeting is None or not meeting.is_alive():
                    giving_up.join(_ABORT_SECONDS)

    def _move(self, flat: Tensor, call: Callable[[Tensor, int], None]) -> None:
        if not flat.numel():
            return
        self._open()
        before = record_event(self.device)
        moved = []
        with on_stream(self._stream):
            self._stream.wait_event(before)
            record_use(flat)
            for piece in flat.split(max(1, PIECE_BYTES // flat.itemsize)):
                call(piece, 1 - self._rank)
                moved.append(record_event(self.device))
        for event in moved:
            assert event is not None
            self._until(event.query)

    def _open(self) -> None:
        """Makes the way in both directions, when the first tensor comes."""
        if self._opened:
            return
        meeting = self._meeting = threading.Thread(target=self._meet, name="shoal-beside", daemon=True)
        meeting.start()
        self._until(lambda: not meeting.is_alive())
        if self._failed is not None:
            self.end()
            raise ConnectionAbortedError(f"the accelerators have not met: {self._failed}") from self._failed
        self._opened = True

    def _meet(self) -> None:
        """Sends and receives one number: NCCL makes its connections in the first calls, and the host waits there for
        the other end, without end."""
        try:
            with on_stream(self._stream):
                number = torch.zeros(1, dtype=torch.uint8, device=self.device)
                calls = (self._group.send, self._group.recv)
                for call in calls if self._rank == 0 else reversed(calls):
                    call(number, 1 - self._rank)
        except Exception as error:
            self._failed = error

    def _give_up(self, meeting: threading.Thread | None) -> None:
        if meeting is not None:
            meeting.join()
        self._group.abort()

    def _until(self, done: Callable[[], bool]) -> None:
        """Returns once it is done. Raises what `send` does; then the group is given up."""
        began = looked = time.monotonic()
        while not self._ended and not done():
            now = time.monotonic()
            if now - began > self._seconds:
                self.end()
                raise TimeoutError
            if now - looked > _GONE_SECONDS:
                looked = now
                if self._gone():
                    self.end()
                    raise ConnectionResetError("it hung up")
            if now - began > _BRISK_SECONDS:
                time.sleep(_REST_SECONDS)
        if self._ended:  # what was under way has been cut short, and counts as done
            raise ConnectionResetError("one of its ends has closed it")


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

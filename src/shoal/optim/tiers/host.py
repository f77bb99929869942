"""Pages in the host's memory, updated on the device: in turns as from a disk, with copies over the link for reads and
writes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from shoal.device import Event, aside, is_accelerator, record_event


class HostPage:
    """A page of `size` bytes on the host, pinned beside a GPU. Futures end when the bytes are there."""

    def __init__(self, size: int, device: torch.device, pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor]) -> None:
        self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=is_accelerator(device))
        self._reads, self._writes = pools

    def read(self, into: Tensor) -> list[Future[None]]:
        """Brings the page's first `into.nbytes` bytes into `into`, on the device."""
        return [self._reads.submit(_copy, self._memory[: into.nbytes], into, into.device, record_event(into.device))]

    def write(self, data: Tensor) -> list[Future[None]]:
        """Takes `data`, from the device, back to the beginning of the page, after what the device was told to do up to
        now."""
        return [self._writes.submit(_copy, data, self._memory[: data.nbytes], data.device, record_event(data.device))]

    def sync(self) -> None:
        """Does nothing: no page survives the process."""

    def mapped(self) -> Tensor:
        """Memory of the page."""
        return self._memory


class HostStore:
    """Pages on the host for a `device`; each direction has a thread and, beside a GPU, a stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools = (ThreadPoolExecutor(1, "shoal-to-device"), ThreadPoolExecutor(1, "shoal-to-host"))

    def files(self, sizes: Mapping[str, int]) -> dict[str, HostPage]:
        """Makes a page for each name."""
        return {name: HostPage(size, self._device, self._pools) for name, size in sizes.items()}

    def buffer(self, nbytes: int) -> Tensor:
        """Allocates memory (uint8) of the device for a page in its turn."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def first(self, nbytes: int) -> Tensor:
        """Allocates memory (uint8) for what a page begins with: on the host, since all pages begin together."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Ends the threads."""
        for pool in self._pools:
            pool.shutdown()


def _copy(source: Tensor, target: Tensor, device: torch.device, after: Event | None) -> None:
    with aside(device, after):
        target.copy_(source, non_blocking=True)


def streams(bytes_a_second: float, host_seconds: float, state_bytes: int) -> bool:
    """Whether an element's `state_bytes`, there and back, pass over the link (duplex) sooner than the host updates it,
    in `host_seconds`."""
    return state_bytes / bytes_a_second < host_seconds

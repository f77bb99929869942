"""Pages in the host's memory, updated on the device: in turns as from a disk, with copies over the link for reads and
writes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class HostPage:
    """A page of `size` bytes on the host, pinned beside a GPU. Futures end when the bytes are there."""

    def __init__(self, size: int, device: torch.device, pools: tuple[ThreadPoolExecutor, ThreadPoolExecutor]) -> None:
        self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._reads, self._writes = pools

    def read(self, into: Tensor) -> list[Future[None]]:
        """Brings the page's first `into.nbytes` bytes into `into`, on the device."""
        return [self._reads.submit(_copy, self._memory[: into.nbytes], into, _now(into))]

    def write(self, data: Tensor) -> list[Future[None]]:
        """Takes `data`, from the device, back to the beginning of the page, after what the device was told to do up to
        now."""
        return [self._writes.submit(_copy, data, self._memory[: data.nbytes], _now(data))]

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

    def close(self) -> None:
        """Ends the threads."""
        for pool in self._pools:
            pool.shutdown()


def _now(on_device: Tensor) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(on_device.device).record_event() if on_device.is_cuda else None


def _copy(source: Tensor, target: Tensor, after: torch.cuda.Event | None) -> None:
    if after is None:
        target.copy_(source)
        return
    device = target.device if target.is_cuda else source.device
    stream = torch.cuda.Stream(device)  # from torch's pool of streams: nothing is made
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        target.copy_(source, non_blocking=True)
    stream.synchronize()


def streams(bytes_a_second: float, host_seconds: float, state_bytes: int) -> bool:
    """Whether an element's `state_bytes`, there and back, pass over the link (duplex) sooner than the host updates it,
    in `host_seconds`."""
    return state_bytes / bytes_a_second < host_seconds

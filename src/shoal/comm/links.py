"""How fast a group is: what an all-reduce of n bytes takes, measured at the start of a run and drawn as a line by `shoal doctor`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shoal.comm.collectives import Group

SIZES = (2**10, 2**15, 2**18, 2**21, 2**24)
"""Bytes of the all-reduces that are timed, in this order."""

LONG = 0.03
"""Seconds after which an all-reduce shows the link's rate well enough: no larger one is tried."""


@dataclass(frozen=True)
class Link:
    """What a group of `ranks` ranks takes for an all-reduce over `carrier`: `rows` of (bytes, seconds), the slowest rank's median."""

    group: str
    ranks: int
    carrier: str
    rows: tuple[tuple[int, float], ...]

    @property
    def latency(self) -> float:
        """Seconds of a short message."""
        return self.rows[0][1]

    @property
    def bandwidth(self) -> float:
        """Bytes of tensor a second that long all-reduces go through at, beyond the latency."""
        nbytes, seconds = self.rows[-1]
        return nbytes / max(seconds - self.latency, 1e-9)

    def __str__(self) -> str:
        return f"{self.ranks} ranks over {self.carrier}: {self.latency * 1e6:.0f} us + {self.bandwidth / 1e9:.3g} GB/s"

    def seconds(self, nbytes: float) -> float:
        """What an all-reduce of `nbytes` takes by the line through the first and the last row."""
        return self.latency + nbytes / self.bandwidth


def measure(group: Group, device: torch.device, sizes: Sequence[int] = SIZES) -> Link:
    """Times all-reduces of `sizes` bytes; every rank of `group` calls it and gets the same answer. A group of one takes no time for any.

    A few tenths of a second at most, but for links so slow that one small message takes that long.
    """
    rows = []
    for nbytes in sizes if group.size > 1 else ():
        tensor = torch.zeros(nbytes // 4, device=device)
        seconds = [_timed(group, tensor) for _ in range(2)][1:]  # the first call opens what it needs
        while len(seconds) < 5 and _slowest(group, sum(seconds)) < LONG:
            seconds.append(_timed(group, tensor))
        rows.append((nbytes, _slowest(group, statistics.median(seconds))))
        if rows[-1][1] > LONG:
            break
    return Link(group.name, group.size, group.transports[device.type].carrier, tuple(rows) or ((sizes[0], 0.0),))


def _timed(group: Group, tensor: torch.Tensor) -> float:
    """Seconds of one all-reduce, from when all ranks are there."""
    group.barrier()
    started = time.perf_counter()
    group.all_reduce(tensor, purpose="measure")
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - started


def _slowest(group: Group, seconds: float) -> float:
    return float(group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max", purpose="measure"))

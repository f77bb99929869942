"""Measurement of a group's speed: times of all-reduces by size, at the start of a run and in `shoal doctor`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from shoal.comm.collectives import Group
from shoal.comm.ledger import Ledger
from shoal.device import kind_of, synchronize

SIZES = (2**10, 2**15, 2**18, 2**21, 2**24)
"""Bytes of the all-reduces that are timed, in this order."""

LONG = 0.03
"""Seconds after which an all-reduce shows the link's rate well enough: no larger one is tried."""


@dataclass(frozen=True)
class Link:
    """The measured speed of a group.

    - `group`, `ranks`: its name and number of ranks
    - `carrier`: name of the transport
    - `rows`: (bytes, seconds) of all-reduces, the slowest rank's median
    """

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
        """Bytes of tensor per second of a long all-reduce, beyond the latency."""
        nbytes, seconds = self.rows[-1]
        return nbytes / max(seconds - self.latency, 1e-9)

    def __str__(self) -> str:
        return f"{self.ranks} ranks over {self.carrier}: {self.latency * 1e6:.0f} us + {self.bandwidth / 1e9:.3g} GB/s"

    def seconds(self, nbytes: float) -> float:
        """Predicts the time of an all-reduce of `nbytes`, by the line through the first and the last row."""
        return self.latency + nbytes / self.bandwidth


Key = tuple[tuple[int, ...], str]
"""Ranks of a group, and the type of device."""

_measured: WeakKeyDictionary[Ledger, dict[Key, Link]] = WeakKeyDictionary()
"""By the ledger, which is that of a world: groups of the same ranks go the same way."""


def link_of(group: Group, device: torch.device) -> Link:
    """Returns the speed of `group` for tensors on `device`. Every rank calls it; the first call measures."""
    links, key = _measured.setdefault(group.ledger, {}), (tuple(group.ranks), device.type)
    if key not in links:
        links[key] = measure(group, device)
    return links[key]


def assume(group: Group, device: torch.device, link: Link) -> None:
    """Has `link_of` answer `link`, where nothing can be measured."""
    _measured.setdefault(group.ledger, {})[tuple(group.ranks), device.type] = link


def measure(group: Group, device: torch.device, sizes: Sequence[int] = SIZES) -> Link:
    """Times all-reduces of `sizes` bytes. Every rank of `group` calls it and gets the same answer.

    Takes a few tenths of a second at most, except over links so slow that one small message takes that long.
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
    return Link(group.name, group.size, group.transports[kind_of(device)].carrier, tuple(rows) or ((sizes[0], 0.0),))


def _timed(group: Group, tensor: torch.Tensor) -> float:
    """Returns the seconds of one all-reduce, from when all ranks are there."""
    group.barrier()
    started = time.perf_counter()
    group.all_reduce(tensor, purpose="measure")
    synchronize(tensor.device)
    return time.perf_counter() - started


def _slowest(group: Group, seconds: float) -> float:
    return float(group.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max", purpose="measure"))

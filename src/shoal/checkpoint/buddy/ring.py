"""Who is whose buddy, and the way from each rank to its buddy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.parcels import PARCEL_BYTES, Parcels
from shoal.comm import Group
from shoal.comm.wire import FIRST, packed, rest_of, unpacked
from shoal.device import CPU

PURPOSE = "buddy"
"""As the ledger books what goes to a buddy."""


def buddies(hosts: Sequence[str]) -> list[int]:
    """Returns the buddy of each rank, given the ranks' hosts: each rank is the buddy of one other.

    Ranks stand in a ring, host by host, and the buddy is as many places on as the largest host has ranks. That is
    another host for all of them, unless a host has more than half of the ranks.
    """
    order = sorted(range(len(hosts)), key=lambda rank: (hosts.index(hosts[rank]), rank))
    on = max(Counter(hosts).values()) % len(hosts) or 1
    found = [0] * len(hosts)
    for place, rank in enumerate(order):
        found[rank] = order[(place + on) % len(hosts)]
    return found


@dataclass(frozen=True)
class _Coming:
    into: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.into.dtype

    @property
    def nbytes(self) -> int:
        return self.into.nbytes


class Ring:
    """The way from each rank of `group` to its `buddy`, and here from the `ward`, whose buddy this rank is. All ranks
    call it alike; all goes through the host's memory."""

    def __init__(self, group: Group, host: str) -> None:
        self.of_all = buddies(group.all_gather_object(host))
        self.buddy, self.ward = self.of_all[group.rank], self.of_all.index(group.rank)
        self._group, self._parcels = group, Parcels(group, CPU, PURPOSE)

    def tell(self, value: Any) -> Any:
        """Sends a value, of the types that `wire` knows, and returns the ward's."""
        mine, first = packed(value), torch.empty(FIRST, dtype=torch.uint8)
        self._group.exchange(first, self.ward, mine[:FIRST], self.buddy, PURPOSE)
        rest = torch.empty(rest_of(first), dtype=torch.uint8)
        self.carry([mine[FIRST:]], [rest])
        return unpacked(torch.cat([first, rest]))

    def carry(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Sends the tensors `out`, on any device, and fills `into`, on the host, which are like the ward's."""
        coming = [_Coming(part) for each in into for part in _parts(each)]
        self._parcels.exchange(self.buddy, [part for each in out for part in _parts(each)], self.ward, coming)


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    return tensor.detach().reshape(-1).split(max(1, PARCEL_BYTES // tensor.element_size())) if tensor.numel() else ()

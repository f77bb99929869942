"""How parameters and rows are shared among several servers. Clients and servers compute the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.errors import UserError


@dataclass(frozen=True)
class Share:
    """Server `index` of `count`. Raises UserError where there is no such server."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UserError(f"{self}: give a server's number, from 0, and how many there are")


def balanced(num_bytes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divides names among `count` servers, so that each has about as many bytes: the largest first, to the server that
    has least (Graham 1969); the names of each keep their order."""
    loads, owner = [0] * count, dict[str, int]()
    for name in sorted(num_bytes, key=lambda name: (-num_bytes[name], name)):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += num_bytes[name]
    return [[name for name in num_bytes if owner[name] == index] for index in range(count)]


class Rows:
    """The rows 0 to `count` - 1 of a table among `servers`.

    Row r has the place r * step mod count, a permutation that mixes; server place mod servers has it, at place //
    servers. So neighbours lie on different servers, and each has its rows without gaps.
    """

    def __init__(self, count: int, servers: int) -> None:
        if not 0 < count < 1 << 31:
            raise UserError(f"a table of {count:,} rows: give from 1 to {(1 << 31) - 1:,}")
        self.count, self.servers = count, servers
        step = 1 if servers == 1 else max(1, int(count * 0.6180339887))  # golden section: spreads neighbours evenly
        while math.gcd(step, count) != 1:
            step += 1
        self._step = step

    def size(self, server: int) -> int:
        """Returns how many rows a server has."""
        return len(range(server, self.count, self.servers))

    def place(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns for each of `rows` (int64) its server and its index there."""
        if self.servers == 1:
            return torch.zeros_like(rows), rows
        place = rows * self._step % self.count
        return place % self.servers, place // self.servers

    def of(self, server: int, some: slice) -> Tensor:
        """Returns the rows of a server whose indices there are in `some`."""
        back = pow(self._step, -1, self.count) if self.count > 1 else 0
        return torch.arange(server, self.count, self.servers)[some] * back % self.count

"""How parameters and rows are shared among several servers. Clients and servers compute the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shoal.errors import UserError

Index = TypeVar("Index", int, Tensor)


@dataclass(frozen=True)
class Share:
    """Server `index` of `count`. Raises UserError where there is no such server."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not (type(self.index) is type(self.count) is int and 0 <= self.index < self.count):
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
    """The rows 0 to `count` - 1 of a table among `servers`, in blocks of `block` neighbours.

    Block b has the place b * step mod `blocks`, a permutation that mixes; server place mod servers has it, as its block
    place // servers. So neighbouring blocks lie on different servers, and each has its blocks one behind the other. The
    last block may be short: where it lies, numbers from `count` on have no row.
    """

    def __init__(self, count: int, servers: int, block: int = 1) -> None:
        if not 0 < count < 1 << 31:
            raise UserError(f"a table of {count:,} rows: give from 1 to {(1 << 31) - 1:,}")
        self.count, self.servers, self.block, self.blocks = count, servers, block, -(-count // block)
        step = 1 if servers == 1 else max(1, int(self.blocks * 0.6180339887))  # golden section: spreads neighbours
        while math.gcd(step, self.blocks) != 1:
            step += 1
        self._step = step
        self._back = pow(step, -1, self.blocks) if self.blocks > 1 else 0

    def size(self, server: int) -> int:
        """Returns for how many rows a server has room."""
        return len(range(server, self.blocks, self.servers)) * self.block

    def place(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns for each of `rows` (int64) its server and its index there."""
        if self.servers == 1:
            return torch.zeros_like(rows), rows
        place = rows // self.block * self._step % self.blocks
        return place % self.servers, place // self.servers * self.block + rows % self.block

    def of(self, server: int, some: slice) -> Tensor:
        """Returns the rows of a server whose indices there are in `some`."""
        return self.row(server, torch.arange(self.size(server))[some])

    def row(self, server: int, index: Index) -> Index:
        """Returns the row of a server at an index, or those at several."""
        block = (server + index // self.block * self.servers) * self._back % self.blocks
        return block * self.block + index % self.block

    def stretches(self, server: int) -> Iterator[tuple[int, int, int]]:
        """Yields the blocks of a server: the index of its first row there, the number of that row, and how many rows
        it has."""
        for index in range(0, self.size(server), self.block):
            first = self.row(server, index)
            yield index, first, min(self.block, self.count - first)

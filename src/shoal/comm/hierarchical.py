"""Collectives of ranks on several hosts: inside each first, then across: a byte leaves a host once.

With L ranks on each of H hosts, there are L groups across: the i-th joins the i-th ranks of all hosts and carries the
i-th part of the data, so that the connections of all L ranks work at once. An all-reduce is

    inside: reduce_scatter   ->   across: all_reduce of each rank's cut   ->   inside: all_gather

Reductions add in the order of the transport inside, then in that of the one across.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.reductions import finish
from shoal.comm.transport import NoSharedMemory, Transport

SMALL_BYTES = 64 * 1024
"""Up to this size ranks send the whole tensor across: two operations inside would cost more than they save."""


class Hierarchical(NoSharedMemory):
    """A `transport.Transport` over several hosts.

    - `rank`: this rank in the group
    - `hosts`: for each host the ranks on it, in the order in which `inside` has them
    - `inside`: joins the ranks of this host
    - `across`: joins the i-th ranks of all hosts, in the order of `hosts`, i being this rank's index on its host
    - `flat`: joins all ranks directly, for operations that gain nothing from the hosts

    Where hosts have unequal numbers of ranks there is only one group across, of the first ranks, and None elsewhere;
    then only all-reduces use it, through the first rank of each host.
    """

    carrier = "hosts, then across"

    def __init__(
        self, rank: int, hosts: list[list[int]], inside: Transport, across: Transport | None, flat: Transport
    ) -> None:
        self.rank, self.size = rank, flat.size
        self._hosts, self._inside, self._across, self._flat = hosts, inside, across, flat
        self._even = len({len(ranks) for ranks in hosts}) == 1
        # all ranks, ordered by their index on the host, then by host
        self._rows = torch.tensor(hosts).T.reshape(-1) if self._even else torch.empty(0)

    def all_reduce(self, flat: Tensor, op: str) -> None:
        step = "sum" if op == "avg" else op
        local = self._inside.size
        cut = flat.numel() // local if self._even and flat.numel() * flat.element_size() > SMALL_BYTES else 0
        if cut:
            body, mine = flat[: cut * local], flat.new_empty(cut)
            self._inside.reduce_scatter(mine, body, step)
            self._cross(mine, step)
            self._inside.all_gather(body, mine)
        if cut * local < flat.numel():
            rest = flat[cut * local :]
            self._inside.all_reduce(rest, step)
            self._cross(rest, step)
            if not self._even:
                self._inside.broadcast(rest, 0)
        finish(flat, op, self.size)

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        """Gives the i-th rank of a host the sums for all hosts' i-th ranks, then scatters those across."""
        if not self._even or self._across is None:
            self._flat.reduce_scatter(out, flat, op)
            return
        step = "sum" if op == "avg" else op
        mine = flat.new_empty(len(self._hosts) * out.numel())
        self._inside.reduce_scatter(mine, flat.view(self.size, -1)[self._rows].view(-1), step)
        self._across.reduce_scatter(out, mine, step)
        finish(out, op, self.size)

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        if not self._even or self._across is None:
            self._flat.all_gather(out, flat)
            return
        mine = flat.new_empty(len(self._hosts) * flat.numel())
        self._across.all_gather(mine, flat)
        everything = torch.empty_like(out)
        self._inside.all_gather(everything, mine)
        rows = self.size, flat.numel()
        out.view(rows)[self._rows] = everything.view(rows)

    def broadcast(self, flat: Tensor, src: int) -> None:
        if not self._even or self._across is None:
            self._flat.broadcast(flat, src)
            return
        host, index = next((h, ranks.index(src)) for h, ranks in enumerate(self._hosts) if src in ranks)
        if self._inside.rank == index:
            self._across.broadcast(flat, host)
        self._inside.broadcast(flat, index)

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        self._flat.all_to_all(out, flat, out_splits, in_splits)

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        self._flat.scatter(out, flat, src)

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        self._flat.gather(out, flat, dst)

    def send(self, flat: Tensor, dst: int) -> None:
        self._flat.send(flat, dst)

    def recv(self, flat: Tensor, src: int) -> None:
        self._flat.recv(flat, src)

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        self._flat.exchange(out, source, flat, target)

    def barrier(self) -> None:
        self._flat.barrier()

    def close(self) -> None:
        for transport in (self._inside, self._across, self._flat):
            if transport is not None:
                transport.close()

    def _cross(self, flat: Tensor, op: str) -> None:
        if self._across is not None:
            self._across.all_reduce(flat, op)

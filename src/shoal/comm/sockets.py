"""Collectives over TCP: every rank talks with all others at once; each cut goes straight to the rank that owns it.

A rank sends as many bytes as in a ring, in two hops instead of 2 (size - 1); sums are added in rank order, as in shared
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.reductions import combined, finish
from shoal.comm.tcp import CHANNELS, Mesh, address_towards
from shoal.comm.transport import NoSharedMemory

PIECE_BYTES = 1 << 20
"""Bytes of a cut reduced at once: the sum of a piece hides behind the next transfer, which the kernel buffers."""

SHORT_BYTES = 1 << 16
"""Up to this size two ranks both reduce the whole tensor: a second hop would cost more than half the sum."""


class Sockets(NoSharedMemory):
    """A `transport.Transport` over TCP. Reduces in rank order, ((r0 + r1) + r2) + ..., the same bits on every rank."""

    carrier = "sockets"

    def __init__(self, store: dist.Store, rank: int, size: int, loopback: bool, timeout: timedelta) -> None:
        """Connects the ranks. `loopback`: all of them are on this host, and no network is needed."""
        self.rank, self.size = rank, size
        self._mesh = Mesh(store, rank, size, "127.0.0.1" if loopback else address_towards(store), timeout)
        self._others = [peer for peer in range(size) if peer != rank]

    def all_reduce(self, flat: Tensor, op: str) -> None:
        """Sends each piece of a cut to its owner, which reduces it and sends the result to all."""
        if _is_short(flat, self.size):
            self._both_reduce(flat, op)
            return
        cuts = _cuts(flat, self.size)
        for piece in pieces(cuts[0]):
            parts = [cut[piece] for cut in cuts]
            total = self._reduce(parts[self.rank], {peer: parts[peer] for peer in self._others}, op)
            parts[self.rank].copy_(finish(total, op, self.size))
            self._swap(dict.fromkeys(self._others, parts[self.rank]), {peer: parts[peer] for peer in self._others})

    def _both_reduce(self, flat: Tensor, op: str) -> None:
        """Exchanges the whole tensors of two ranks: as many bytes as by cuts and twice the sums, but one hop."""
        flat.copy_(finish(self._reduce(flat, {1 - self.rank: flat}, op), op, self.size))

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        cuts = _cuts(flat, self.size)
        for piece in pieces(out):
            total = self._reduce(cuts[self.rank][piece], {peer: cuts[peer][piece] for peer in self._others}, op)
            out[piece].copy_(finish(total, op, self.size))

    def _reduce(self, own: Tensor, out: Mapping[int, Tensor], op: str) -> Tensor:
        """Sends `out[peer]` to each peer; returns the reduction, in rank order, of `own` and what the peers sent."""
        arriving = {peer: torch.empty_like(own) for peer in self._others}
        self._swap(out, arriving)
        return combined([own if rank == self.rank else arriving[rank] for rank in range(self.size)], op)

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        cuts = out.view(self.size, flat.numel())
        if cuts[self.rank].data_ptr() != flat.data_ptr():
            cuts[self.rank].copy_(flat)
        self._swap(dict.fromkeys(self._others, cuts[self.rank]), {peer: cuts[peer] for peer in self._others})

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        parts, rows = out.split(list(out_splits)), flat.split(list(in_splits))
        parts[self.rank].copy_(rows[self.rank])
        self._swap({peer: rows[peer] for peer in self._others}, {peer: parts[peer] for peer in self._others})

    def broadcast(self, flat: Tensor, src: int) -> None:
        """Passes the tensor round the ring from `src`, piece by piece, so that every link carries it once."""
        distance, left, right = (self.rank - src) % self.size, (self.rank - 1) % self.size, (self.rank + 1) % self.size
        passed = [flat[piece] for piece in pieces(flat)]
        coming = [{left: piece} if distance > 0 else {} for piece in passed]
        going = [{right: piece} if distance < self.size - 1 else {} for piece in passed]
        for receive, send in zip([*coming, {}], [{}, *going], strict=True):
            self._swap(send, receive)

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        if self.rank != src:
            self._swap({}, {src: out})
            return
        assert flat is not None, "the root brings the tensor to scatter"
        cuts = flat.view(self.size, out.numel())
        out.copy_(cuts[src])
        self._swap({peer: cuts[peer] for peer in self._others}, {})

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        if self.rank != dst:
            self._swap({dst: flat}, {})
            return
        assert out is not None, "the root brings the tensor to gather into"
        cuts = out.view(self.size, flat.numel())
        cuts[dst].copy_(flat)
        self._swap({}, {peer: cuts[peer] for peer in self._others})

    def send(self, flat: Tensor, dst: int) -> None:
        self._mesh.swap({dst: flat}, {}, CHANNELS[1])

    def recv(self, flat: Tensor, src: int) -> None:
        self._mesh.swap({}, {src: flat}, CHANNELS[1])

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        if source == target == self.rank:
            out.copy_(flat)
            return
        self._mesh.swap({target: flat}, {source: out}, CHANNELS[1])

    def barrier(self) -> None:
        """Waits for every rank: round k takes a byte from the rank 2^k before and gives one to the rank 2^k after."""
        here, there = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        distance = 1
        while distance < self.size:
            self._swap({(self.rank + distance) % self.size: here}, {(self.rank - distance) % self.size: there})
            distance *= 2

    def close(self) -> None:
        self._mesh.close()

    def _swap(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        self._mesh.swap(out, into)


def _cuts(flat: Tensor, size: int) -> list[Tensor]:
    """Returns each rank's cut of `flat`: even, except that the last ones may be shorter or empty."""
    each = -(-flat.numel() // size)
    return [flat[rank * each : (rank + 1) * each] for rank in range(size)]


def _is_short(flat: Tensor, size: int) -> bool:
    return size == 2 and flat.nbytes <= SHORT_BYTES


def pieces_of_sum(flat: Tensor, size: int) -> list[Tensor]:
    """The pieces of a tensor that a rank sums at a time in an all-reduce."""
    if _is_short(flat, size):
        return [flat]
    cut = _cuts(flat, size)[0]
    return [cut[piece] for piece in pieces(cut)]


def pieces(flat: Tensor) -> list[slice]:
    """The pieces of a cut that are reduced at once."""
    step = max(1, PIECE_BYTES // flat.element_size())
    return [slice(start, start + step) for start in range(0, flat.numel(), step)]

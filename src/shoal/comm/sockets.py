"""Collectives over TCP: every rank talks with all others at once, each cut goes straight to whom it belongs to.

The bytes of a rank are those of a ring, in two hops instead of 2 (size - 1); sums are added in rank order, as shared memory does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.reductions import COMBINE, finish
from shoal.comm.tcp import CHANNELS, Mesh, address_towards
from shoal.comm.transport import NoSharedMemory

PIECE_BYTES = 1 << 20
"""Of a cut, what is reduced at once: the sum of one piece hides behind the transfer of the next, which the kernel buffers."""

SHORT_BYTES = 1 << 16
"""Up to here two ranks each reduce the whole of a tensor: another hop would cost more than the sum of the other half."""


class Sockets(NoSharedMemory):
    """See `transport.Transport`. Reduces in rank order: ((r0 + r1) + r2) + ..., the same bits on every rank."""

    carrier = "sockets"

    def __init__(self, store: dist.Store, rank: int, size: int, loopback: bool, timeout: timedelta) -> None:
        """`loopback`: all ranks are on this host, and no network is needed."""
        self.rank, self.size = rank, size
        self._mesh = Mesh(store, rank, size, "127.0.0.1" if loopback else address_towards(store), timeout)
        self._others = [peer for peer in range(size) if peer != rank]

    def all_reduce(self, flat: Tensor, op: str) -> None:
        """Piece by piece of a cut: to whom it belongs, and reduced from there to all."""
        if self.size == 2 and flat.nbytes <= SHORT_BYTES:
            self._both_reduce(flat, op)
            return
        cuts = _cuts(flat, self.size)
        for piece in _pieces(cuts[0]):
            parts = [cut[piece] for cut in cuts]
            total = self._reduce(parts[self.rank], {peer: parts[peer] for peer in self._others}, op)
            parts[self.rank].copy_(finish(total, op, self.size))
            self._swap(dict.fromkeys(self._others, parts[self.rank]), {peer: parts[peer] for peer in self._others})

    def _both_reduce(self, flat: Tensor, op: str) -> None:
        """Two ranks send each other all they have: as many bytes as by cuts and twice the sums, but one hop."""
        flat.copy_(finish(self._reduce(flat, {1 - self.rank: flat}, op), op, self.size))

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        cuts = _cuts(flat, self.size)
        for piece in _pieces(out):
            total = self._reduce(cuts[self.rank][piece], {peer: cuts[peer][piece] for peer in self._others}, op)
            out[piece].copy_(finish(total, op, self.size))

    def _reduce(self, own: Tensor, out: Mapping[int, Tensor], op: str) -> Tensor:
        """Sends `out`; the reduction, in rank order, of `own` and what comes."""
        arriving = {peer: torch.empty_like(own) for peer in self._others}
        self._swap(out, arriving)
        parts = [own if rank == self.rank else arriving[rank] for rank in range(self.size)]
        total = COMBINE[op](parts[0], parts[1])
        for part in parts[2:]:
            COMBINE[op](total, part, out=total)
        return total

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
        """From `src` on each rank passes the tensor to its right, piece by piece, so that every link carries it once."""
        place, left, right = (self.rank - src) % self.size, (self.rank - 1) % self.size, (self.rank + 1) % self.size
        pieces = [flat[piece] for piece in _pieces(flat)]
        coming = [{left: piece} if place > 0 else {} for piece in pieces]
        going = [{right: piece} if place < self.size - 1 else {} for piece in pieces]
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
        """In round k from the rank 2^k before this one, to the one 2^k after it."""
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
    """Each rank's cut of `flat`: even ones, but that the last may be shorter or empty."""
    each = -(-flat.numel() // size)
    return [flat[rank * each : (rank + 1) * each] for rank in range(size)]


def _pieces(flat: Tensor) -> list[slice]:
    step = max(1, PIECE_BYTES // flat.element_size())
    return [slice(start, start + step) for start in range(0, flat.numel(), step)]

"""Collectives over TCP: gloo's connections, and our own algorithms where gloo's are far from line rate.

Milliseconds for 32 MiB of fp32 in all, each rank in a network namespace behind a token bucket of 1 Gbit/s, median of 3, two cores for all; "ideal"
is the formula of `transport.sent_bytes` at line rate. 2 ranks | 4 ranks:

    operation        ideal      gloo       own
    reduce_scatter   134|201    338|488    148|219    a pipelined ring (gloo's is an all-reduce inside): taken
    all_gather       134|201    195|371    153|221    a pipelined ring: taken
    all_to_all       134|201    281|335    145|233    one pair after the other: taken
    broadcast        268|805    283|842    297|290    a pipelined chain, in which every link carries the tensor once: taken
    all_reduce       268|403    288|451    351|536    both rings: taken for "min", "max", "product" only, where gloo's may lose a NaN

Receives are posted before sends: gloo's note to the peer that a receive is ready would otherwise queue behind the data, and the two directions
of a link would take turns (a 2-rank reduce-scatter took 283 ms).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.reductions import COMBINE, finish

PIECE_BYTES = 512 * 1024
"""What rings and chains send at once: the sum of one piece hides behind the transfer of the next."""


class Sockets:
    """See `transport.Transport`. Every rank gets the same bits.

    `reduce_scatter` reduces the cut of rank c in ring order from its right-hand neighbour on: ((x[c+1] + x[c+2]) + ...) + x[c], ranks modulo
    size; so does an `all_reduce` by "min", "max" or "product". One by "sum" or "avg" adds in an order of gloo's.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, loopback: bool, timeout: timedelta) -> None:
        """`loopback`: all ranks are on this host, and no network is needed."""
        self.rank, self.size = rank, size
        self._left, self._right = (rank - 1) % size, (rank + 1) % size
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [_device(store, loopback)]
        self._open: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def all_reduce(self, flat: Tensor, op: str) -> None:
        if op in ("sum", "avg"):
            self._gloo.allreduce([flat], dist.ReduceOp.SUM).wait()
            finish(flat, op, self.size)
            return
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % self.size)])
        cut = padded.view(self.size, -1)[self.rank]
        self.reduce_scatter(cut, padded, op)
        self.all_gather(padded, cut)
        flat.copy_(padded[: flat.numel()])

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        """In each of size - 1 rounds a rank combines a partial result from the left with its own tensor and passes that on."""
        cuts = flat.view(self.size, -1)
        arriving = _pieces(torch.empty_like(out))
        receives = [self._irecv(piece, self._left) for piece in arriving]
        sends = [self._isend(piece, self._right) for piece in _pieces(cuts[self._left])]
        for round_ in range(2, self.size + 1):
            last = round_ == self.size
            mine = _pieces(cuts[(self.rank - round_) % self.size])
            totals = _pieces(out) if last else mine
            for index, (partial, own, total) in enumerate(zip(arriving, mine, totals, strict=True)):
                receives[index].wait()
                COMBINE[op](partial, own, out=total)
                if not last:
                    receives[index] = self._irecv(partial, self._left)
                    sends.append(self._isend(total, self._right))
        _wait(sends)
        finish(out, op, self.size)

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        """In each of size - 1 rounds a rank passes on, to the right, the cut that came from the left in the round before."""
        cuts = out.view(self.size, -1)
        coming = [piece for round_ in range(1, self.size) for piece in _pieces(cuts[(self.rank - round_) % self.size])]
        receives = [self._irecv(piece, self._left) for piece in coming]
        cuts[self.rank].copy_(flat)
        own = _pieces(cuts[self.rank])
        sends = [self._isend(piece, self._right) for piece in own]
        for index, (piece, receive) in enumerate(zip(coming, receives, strict=True)):
            receive.wait()
            if index < len(coming) - len(own):
                sends.append(self._isend(piece, self._right))
        _wait(sends)

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        parts, rows = out.split(list(out_splits)), flat.split(list(in_splits))
        parts[self.rank].copy_(rows[self.rank])
        for distance in range(1, self.size):
            source, target = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            self.exchange(parts[source], source, rows[target], target)

    def broadcast(self, flat: Tensor, src: int) -> None:
        """From `src` on each rank passes the tensor to its right, piece by piece."""
        place, pieces = (self.rank - src) % self.size, _pieces(flat)
        receives = [self._irecv(piece, self._left) for piece in pieces] if place > 0 else []
        sends = []
        for index, piece in enumerate(pieces):
            if receives:
                receives[index].wait()
            if place < self.size - 1:
                sends.append(self._isend(piece, self._right))
        _wait(sends)

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        if self.rank != src:
            self.recv(out, src)
            return
        assert flat is not None, "the root brings the tensor to scatter"
        cuts = flat.view(self.size, -1)
        sends = [self._isend(cuts[rank], rank) for rank in range(self.size) if rank != src]
        out.copy_(cuts[src])
        _wait(sends)

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        if self.rank != dst:
            self.send(flat, dst)
            return
        assert out is not None, "the root brings the tensor to gather into"
        cuts = out.view(self.size, -1)
        receives = [self._irecv(cuts[rank], rank) for rank in range(self.size) if rank != dst]
        cuts[dst].copy_(flat)
        _wait(receives)

    def send(self, flat: Tensor, dst: int) -> None:
        self._isend(flat, dst).wait()

    def recv(self, flat: Tensor, src: int) -> None:
        self._irecv(flat, src).wait()

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        if source == target == self.rank:
            out.copy_(flat)
            return
        _wait([self._irecv(out, source), self._isend(flat, target)])

    def barrier(self) -> None:
        self._gloo.barrier().wait()

    def close(self) -> None:
        self._open = None

    @property
    def _gloo(self) -> Any:
        if self._open is None:
            raise RuntimeError("the group has been closed")
        return self._open

    def _isend(self, flat: Tensor, dst: int) -> Any:
        return self._gloo.send([flat], dst, 0)

    def _irecv(self, flat: Tensor, src: int) -> Any:
        return self._gloo.recv([flat], src, 0)


def _pieces(flat: Tensor) -> Sequence[Tensor]:
    return flat.split(max(1, PIECE_BYTES // flat.element_size()))


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


def _device(store: dist.Store, loopback: bool) -> Any:
    """The network of gloo's connections: that through which this rank reaches the store, or that of the host's name."""
    gloo: Any = dist.ProcessGroupGloo
    if loopback:
        return gloo.create_device(hostname="127.0.0.1")
    address = _address_towards(store)
    return gloo.create_device(hostname=address) if address else gloo.create_default_device()


def _address_towards(store: dist.Store) -> str | None:
    """This host's address as the host of a TCP store sees it; None for other stores, and where that is this host's loopback."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    family, kind, protocol, _, server = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(server)  # sends nothing: asks for the route
        address: str = probe.getsockname()[0]
    return None if ipaddress.ip_address(address).is_loopback else address

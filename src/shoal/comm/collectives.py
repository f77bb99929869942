"""A group of ranks and its collectives: blocking, in place, over one transport for each kind of device.

A Group books each call in the ledger, flattens tensors, and names the missing ranks when a call fails; a
`transport.Transport` carries it. On CUDA an operation is ordered on the current stream and does not block the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.flat import flat_of, write_back
from shoal.comm.ledger import Ledger, Peers
from shoal.comm.reductions import check_reduction
from shoal.comm.roll_call import RollCall
from shoal.comm.sizes import check_fit, splits_of
from shoal.comm.stalls import Stalls
from shoal.comm.transport import Transport, for_every_device, sent_bytes
from shoal.comm.turns import Turns, in_one_turn
from shoal.comm.wire import FIRST, is_error, packed, rest_of, unpacked
from shoal.device import is_own_failure, kind_of
from shoal.errors import LaunchError

_MESSAGES = ("send", "recv", "exchange")
"""Operations without all ranks: they are not numbered, and no roll is called when they fail."""


class Group:
    """An ordered group of ranks of a World, made by `World.group`, or by `Group.of` around a transport.

    - `name`: name of the group, under which the ledger books its traffic
    - `ranks`: ranks in the world, in the order of the group
    - `ledger`: where calls are booked
    - `transports`: by device type, "cpu" and perhaps an accelerator's
    - `store`: the group's store, for the roll call after a failure
    - `stalls`: watches for calls that wait unusually long
    - `gone`: whether a rank of the world is known to have ended

    `rank`, and the arguments `src`, `dst`, `source` and `target` below, count within the group. Every rank calls the
    same operations in the same order (`send`, `recv` and `exchange`: only those concerned). Tensors may have any shape
    and strides; the sizes of one call must fit each other. A call that fails raises LaunchError with the operation and
    the ranks that did not come. Threads may share a group: a collective waits for those that were called before it, and
    the callers must keep their order the same on all ranks.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        ledger: Ledger,
        transports: Mapping[str, Transport],
        store: dist.Store | None = None,
        stalls: Stalls | None = None,
        gone: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.name, self.ranks, self.ledger, self.transports = name, ranks, ledger, transports
        self.rank, self.size = transports["cpu"].rank, len(ranks)
        self._peers = Peers(name, ranks[0], ranks[-1], len(ranks))
        self._store = store  # transports' own have prefixes, and do not keep it alive
        self._calls = 0
        self._roll = RollCall(store, self.rank, ranks, gone)
        self._turns = Turns()
        self._open = stalls.watch(name, self.rank, ranks, store) if stalls is not None and self.size > 1 else None

    @classmethod
    def of(cls, transport: Transport, name: str = "group", ledger: Ledger | None = None) -> Group:
        """Makes a group over all ranks of `transport`, which carries tensors of every device."""
        return cls(name, list(range(transport.size)), ledger or Ledger(), for_every_device(transport))

    def all_reduce(self, tensor: Tensor, op: str = "sum", purpose: str = "") -> Tensor:
        """Replaces `tensor` on every rank by the `op` ("sum", "avg", "min", "max", "product") over all; returns it.

        "avg" divides the sum by the number of ranks. Raises UserError for the "avg" of integers.
        """
        check_reduction(op, tensor.dtype)
        flat = flat_of(tensor)
        self.run("all_reduce", purpose, flat, lambda t: t.all_reduce(flat, op))
        return write_back(tensor, flat)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, purpose: str = "", op: str = "sum") -> Tensor:
        """Fills `out` with this rank's even cut of the `op` of `tensor` over all ranks; returns `out`.

        `tensor` has size * out.numel() elements and may be overwritten.
        """
        check_reduction(op, tensor.dtype)
        into, flat = flat_of(out), flat_of(tensor)
        check_fit("reduce_scatter", self.name, self.size, whole=flat, cut=into)
        self.run("reduce_scatter", purpose, flat, lambda t: t.reduce_scatter(into, flat, op))
        return write_back(out, into)

    def all_gather(self, out: Tensor, tensor: Tensor, purpose: str = "") -> Tensor:
        """Fills `out` (size * tensor.numel() elements) with every rank's `tensor` in rank order; returns `out`.

        `tensor` may be this rank's part of `out`.
        """
        into, flat = flat_of(out), flat_of(tensor)
        check_fit("all_gather", self.name, self.size, whole=into, cut=flat)
        self.run("all_gather", purpose, into, lambda t: t.all_gather(into, flat))
        return write_back(out, into)

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        purpose: str = "",
    ) -> Tensor:
        """Sends split r of `tensor` to rank r, fills split r of `out` with what rank r sent; returns `out`.

        `out_splits` and `in_splits`: number of elements for each rank; None for even splits.
        """
        into, flat = flat_of(out), flat_of(tensor)
        receives = splits_of("out_splits", into, out_splits, self.size)
        sends = splits_of("in_splits", flat, in_splits, self.size)
        wire = (flat.numel() - sends[self.rank]) * flat.element_size()
        self.run("all_to_all", purpose, flat, lambda t: t.all_to_all(into, flat, receives, sends), wire=wire)
        return write_back(out, into)

    def broadcast(self, tensor: Tensor, src: int = 0, purpose: str = "") -> Tensor:
        """Copies the `tensor` of rank `src` to all ranks; returns it."""
        flat = flat_of(tensor)
        self.run("broadcast", purpose, flat, lambda t: t.broadcast(flat, src), root=src)
        return write_back(tensor, flat)

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int = 0, purpose: str = "") -> Tensor:
        """Fills `out` on each rank with its even cut of the `tensor` of rank `src`; returns `out`.

        `tensor` has size * out.numel() elements on `src` and is ignored elsewhere.
        """
        into = flat_of(out)
        flat = None if tensor is None or self.rank != src else flat_of(tensor)
        if self.rank == src:
            check_fit("scatter", self.name, self.size, whole=flat, cut=into)
        self.run("scatter", purpose, into, lambda t: t.scatter(into, flat, src), root=src, times=self.size)
        return write_back(out, into)

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int = 0, purpose: str = "") -> Tensor | None:
        """Fills `out` on rank `dst` with every rank's `tensor` in rank order; returns `out`.

        `out` has size * tensor.numel() elements on `dst` and is ignored elsewhere.
        """
        flat = flat_of(tensor)
        into = None if out is None or self.rank != dst else flat_of(out)
        if self.rank == dst:
            check_fit("gather", self.name, self.size, whole=into, cut=flat)
        self.run("gather", purpose, flat, lambda t: t.gather(into, flat, dst), root=dst, times=self.size)
        return out if out is None or into is None else write_back(out, into)

    def send(self, tensor: Tensor, dst: int, purpose: str = "") -> None:
        """Sends `tensor` to rank `dst`, which calls `recv`."""
        flat = flat_of(tensor)
        self.run("send", purpose, flat, lambda t: t.send(flat, dst), wire=flat.nbytes, peer=dst)

    def recv(self, tensor: Tensor, src: int, purpose: str = "") -> Tensor:
        """Fills `tensor` with what rank `src` sends; returns it."""
        flat = flat_of(tensor)
        self.run("recv", purpose, flat, lambda t: t.recv(flat, src), wire=0, peer=src)
        return write_back(tensor, flat)

    def exchange(self, out: Tensor, source: int, tensor: Tensor, target: int, purpose: str = "") -> Tensor:
        """Sends `tensor` to rank `target` while filling `out` from rank `source`; returns `out`."""
        into, flat = flat_of(out), flat_of(tensor)
        wire = flat.nbytes if target != self.rank else 0
        self.run("exchange", purpose, flat, lambda t: t.exchange(into, source, flat, target), wire=wire, peer=source)
        return write_back(out, into)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a zeroed 1-D CPU tensor that this group's reductions and gathers take without copies, or None.

        All ranks call it with the same arguments. None, on all ranks, where the transport has no such memory.
        """
        with self._turns:
            return self.transports["cpu"].allocate(numel, dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a zeroed 1-D CPU tensor in the same memory on all ranks; None, on all, where there is none.

        The ranks agree by other means (a barrier) on who writes where and when others may read.
        """
        with self._turns:
            return self.transports["cpu"].allocate_common(numel, dtype)

    def barrier(self) -> None:
        """Waits until every rank has come."""
        self.run("barrier", "", torch.empty(0), lambda t: t.barrier())

    @in_one_turn
    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every rank's `value` in rank order. Values are of the types that `wire` knows.

        Raises UserError, on all ranks, where one of them has another type.
        """
        mine = packed(value)
        rows = self.all_gather(mine.new_empty(self.size * FIRST), mine[:FIRST], "object").view(self.size, FIRST)
        if longest := max(map(rest_of, rows)):
            rest = mine.new_zeros(longest)
            rest[: mine.numel() - FIRST] = mine[FIRST:]
            gathered = self.all_gather(mine.new_empty(self.size * longest), rest, "object")
            rows = torch.cat([rows, gathered.view(self.size, longest)], 1)
        return [unpacked(row) for row in rows]

    @in_one_turn
    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Returns the `value` of rank `src`, of the types that `wire` knows; `src` itself gets its own object back.

        Raises UserError, on all ranks, for another type.
        """
        gives = self.rank == src
        data = packed(value) if gives and self.size > 1 else packed(None)
        first = self.broadcast(data[:FIRST].clone(), src, "object")
        if rest := rest_of(first):
            more = self.broadcast(data[FIRST:].clone() if gives else data.new_empty(rest), src, "object")
            first = torch.cat([first, more])
        return value if gives and not is_error(first) else unpacked(first)

    def close(self) -> None:
        """Closes the connections; no operation can follow."""
        for transport in {id(each): each for each in self.transports.values()}.values():
            transport.close()

    def run(
        self,
        operation: str,
        purpose: str,
        flat: Tensor,
        call: Callable[[Transport], None],
        *,
        root: int = 0,
        times: int = 1,
        wire: int | None = None,
        peer: int | None = None,
    ) -> None:
        """Books, times and runs one call; names those who are missing when it fails.

        - `flat`: the tensor whose bytes, `times` as many, are the payload; its device picks the transport
        - `call`: the operation of the transport
        - `root`: the rank that has the whole tensor, for operations with a root
        - `wire`: bytes that this rank hands to others, where the table of `sent_bytes` does not give them
        - `peer`: the other rank of a message
        """
        payload = times * flat.nbytes
        if wire is None:
            wire = sent_bytes(operation, payload, self.size, self.rank, root)
        self.ledger.count(self.name, operation, purpose, payload, wire)
        if operation in _MESSAGES:
            self._carry(operation, purpose, payload, flat, call, peer)
            return
        with self._turns:
            self._calls += 1
            self._carry(operation, purpose, payload, flat, call)

    def _carry(
        self,
        operation: str,
        purpose: str,
        payload: int,
        flat: Tensor,
        call: Callable[[Transport], None],
        peer: int | None = None,
    ) -> None:
        started = time.monotonic()
        under_way = self._open.begin(_what(operation, purpose), self._calls, peer) if self._open is not None else None
        try:
            transport = self.transports[kind_of(flat.device)]
            if not self.ledger.recording:
                call(transport)
                return
            with self.ledger.span("comm", purpose or operation, payload, "transfer", operation, self._peers):
                call(transport)
        except RuntimeError as error:
            if under_way is not None:
                under_way.failed = True
            if is_own_failure(error):
                raise
            raise LaunchError(self._autopsy(operation, purpose, time.monotonic() - started, error)) from error
        finally:
            self.ledger.wait(time.monotonic() - started)
            if self._open is not None:
                self._open.end()

    def _autopsy(self, operation: str, purpose: str, waited: float, error: RuntimeError) -> str:
        """Describes the failure. Where there is a store, a roll call finds the ranks that did not come."""
        what = _what(operation, purpose)
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        if operation in _MESSAGES:
            where, roll = f"in group {self.name}, {what}", ""
        else:
            where, roll = f"collective {self._calls} of group {self.name}, {what}", self._roll.call(self._calls)
        return f"rank {self.ranks[self.rank]}: {where}, failed after {waited:.1f} s; {roll}Cause: {cause}"


def _what(operation: str, purpose: str) -> str:
    return f"{operation} ({purpose})" if purpose else operation

"""A group of ranks and its collectives: blocking, in place, over a transport for each kind of device.

A Group books each call in the ledger, flattens tensors, and says who is missing when a call fails; a `transport.Transport` carries it. On
CUDA an operation is ordered on the current stream and does not block the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm import wire
from shoal.comm.flat import flat_of, write_back
from shoal.comm.ledger import Ledger
from shoal.comm.links import Link, measure
from shoal.comm.reductions import check_reduction
from shoal.comm.stalls import Stalls
from shoal.comm.transport import Transport, sent_bytes
from shoal.comm.turns import Turns, in_one_turn
from shoal.errors import LaunchError

_ROLL_CALL_SECONDS = 0.5  # once in the life of a group; a launcher waits little longer for the ranks that have lost one
_MESSAGES = ("send", "recv", "exchange")
"""Operations to which not all ranks come: they are not numbered, and no roll is called when they fail."""


class Group:
    """Some ranks of a World, in order; `rank` is this rank's place among them, as are `src`, `dst`, `source` and `target` below.

    Made by `World.group`, or by `Group.of` around a transport. `transports`: by device type, "cpu" and perhaps "cuda". Every rank of the
    group calls the same operations in the same order (`send`, `recv` and `exchange`: those concerned). Tensors may have any shape and
    strides; those of one call fit each other. A call that fails raises LaunchError with the operation and the ranks that did not come.
    Threads may share a group: collectives wait for those that were called before; the order is for the callers to keep.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        ledger: Ledger,
        transports: Mapping[str, Transport],
        store: dist.Store | None = None,
        stalls: Stalls | None = None,
    ) -> None:
        self.name, self.ranks, self.ledger, self.transports = name, ranks, ledger, transports
        self.rank, self.size = transports["cpu"].rank, len(ranks)
        self._store = store
        self._calls = 0
        self._failed = False
        self._turns = Turns()
        self._open = stalls.watch(name, self.rank, ranks, store) if stalls is not None and self.size > 1 else None
        self._links: dict[str, Link] = {}

    @classmethod
    def of(cls, transport: Transport, name: str = "group", ledger: Ledger | None = None) -> Group:
        """A group over all ranks of `transport`, which carries tensors of every device."""
        return cls(name, list(range(transport.size)), ledger or Ledger(), {"cpu": transport, "cuda": transport})

    def all_reduce(self, tensor: Tensor, op: str = "sum", purpose: str = "") -> Tensor:
        """Replaces `tensor` on every rank by the `op` ("sum", "avg", "min", "max", "product") over the ranks; returns it.

        "avg" is the sum divided by the number of ranks; UserError for integers.
        """
        check_reduction(op, tensor.dtype)
        flat = flat_of(tensor)
        self._run("all_reduce", purpose, flat, lambda transport: transport.all_reduce(flat, op))
        return write_back(tensor, flat)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, purpose: str = "", op: str = "sum") -> Tensor:
        """Fills `out` with this rank's even cut of the `op` of `tensor` (size * out.numel()) over the ranks; returns it.

        `tensor` may be overwritten.
        """
        check_reduction(op, tensor.dtype)
        into, flat = flat_of(out), flat_of(tensor)
        self._fits("reduce_scatter", whole=flat, cut=into)
        self._run("reduce_scatter", purpose, flat, lambda transport: transport.reduce_scatter(into, flat, op))
        return write_back(out, into)

    def all_gather(self, out: Tensor, tensor: Tensor, purpose: str = "") -> Tensor:
        """Fills `out` (size * tensor.numel()) with every rank's `tensor` in rank order; returns it. `tensor` may be a part of `out`."""
        into, flat = flat_of(out), flat_of(tensor)
        self._fits("all_gather", whole=into, cut=flat)
        self._run("all_gather", purpose, into, lambda transport: transport.all_gather(into, flat))
        return write_back(out, into)

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        purpose: str = "",
    ) -> Tensor:
        """Sends the r-th split of `tensor` to rank r, fills the r-th split of `out` with what rank r sent; returns `out`.

        Splits are counts of elements, one a rank; None: even ones.
        """
        into, flat = flat_of(out), flat_of(tensor)
        receives = self._splits("out_splits", into, out_splits)
        sends = self._splits("in_splits", flat, in_splits)
        wire = (flat.numel() - sends[self.rank]) * flat.element_size()
        self._run("all_to_all", purpose, flat, lambda transport: transport.all_to_all(into, flat, receives, sends), wire=wire)
        return write_back(out, into)

    def broadcast(self, tensor: Tensor, src: int = 0, purpose: str = "") -> Tensor:
        """Copies the `tensor` of rank `src` to all; returns it."""
        flat = flat_of(tensor)
        self._run("broadcast", purpose, flat, lambda transport: transport.broadcast(flat, src), root=src)
        return write_back(tensor, flat)

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int = 0, purpose: str = "") -> Tensor:
        """Fills each rank's `out` with its even cut of `tensor` (size * out.numel(), on `src` only, else None); returns `out`."""
        into = flat_of(out)
        flat = None if tensor is None or self.rank != src else flat_of(tensor)
        if self.rank == src:
            self._fits("scatter", whole=flat, cut=into)
        self._run("scatter", purpose, into, lambda transport: transport.scatter(into, flat, src), root=src, times=self.size)
        return write_back(out, into)

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int = 0, purpose: str = "") -> Tensor | None:
        """Fills `out` (size * tensor.numel(), on `dst` only, else None) with every rank's `tensor` in rank order; returns `out`."""
        flat = flat_of(tensor)
        into = None if out is None or self.rank != dst else flat_of(out)
        if self.rank == dst:
            self._fits("gather", whole=into, cut=flat)
        self._run("gather", purpose, flat, lambda transport: transport.gather(into, flat, dst), root=dst, times=self.size)
        return out if out is None or into is None else write_back(out, into)

    def send(self, tensor: Tensor, dst: int, purpose: str = "") -> None:
        """Hands `tensor` to rank `dst`, which calls `recv`."""
        flat = flat_of(tensor)
        self._run("send", purpose, flat, lambda transport: transport.send(flat, dst), wire=flat.nbytes, peer=dst)

    def recv(self, tensor: Tensor, src: int, purpose: str = "") -> Tensor:
        """Fills `tensor` with what rank `src` sends; returns it."""
        flat = flat_of(tensor)
        self._run("recv", purpose, flat, lambda transport: transport.recv(flat, src), wire=0, peer=src)
        return write_back(tensor, flat)

    def exchange(self, out: Tensor, source: int, tensor: Tensor, target: int, purpose: str = "") -> Tensor:
        """Sends `tensor` to rank `target` and fills `out` from rank `source` at the same time; returns `out`."""
        into, flat = flat_of(out), flat_of(tensor)
        wire = flat.nbytes if target != self.rank else 0
        self._run("exchange", purpose, flat, lambda transport: transport.exchange(into, source, flat, target), wire=wire, peer=source)
        return write_back(out, into)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A zeroed 1-D CPU tensor that this group's reductions and gathers take without copies, where the transport has such memory (all
        ranks call it alike); else None."""
        with self._turns:
            return self.transports["cpu"].allocate(numel, dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A zeroed 1-D CPU tensor that is one and the same memory on all ranks, where the transport has such; else None, on all of them.
        Who writes where, and when others may read, the ranks settle by other means (a barrier)."""
        with self._turns:
            return self.transports["cpu"].allocate_common(numel, dtype)

    def link(self, device: torch.device) -> Link:
        """How fast all-reduces of tensors on `device` are; measured at the first call, which all ranks make alike."""
        if device.type not in self._links:
            self._links[device.type] = measure(self, device)
        return self._links[device.type]

    def barrier(self) -> None:
        """Returns when every rank has come."""
        self._run("barrier", "", torch.empty(0), lambda transport: transport.barrier())

    @in_one_turn
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, of the types that `wire` has, in rank order. UserError, on all ranks, where one of them has another type."""
        mine, size = _packed(value)
        sizes = self.all_gather(torch.empty(self.size, dtype=torch.int64), torch.tensor([size]), "object").tolist()
        longest = max(map(abs, sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        rows = self.all_gather(torch.empty(self.size * longest, dtype=torch.uint8), padded, "object").view(self.size, -1)
        return [_unpacked(row, size) for row, size in zip(rows, sizes, strict=True)]

    @in_one_turn
    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """The `value` of rank `src`, of the types that `wire` has; there it is returned as it is. UserError, on all ranks, for another type."""
        data, size = _packed(value) if self.rank == src and self.size > 1 else (torch.empty(0, dtype=torch.uint8), 0)
        size = int(self.broadcast(torch.tensor([size]), src, "object"))
        if self.rank != src:
            data = torch.empty(abs(size), dtype=torch.uint8)
        self.broadcast(data, src, "object")
        return value if self.rank == src and size >= 0 else _unpacked(data, size)

    def close(self) -> None:
        """Ends the connections; no operation can follow."""
        for transport in {id(each): each for each in self.transports.values()}.values():
            transport.close()

    def _run(
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
        """Books and times one call, `times` the bytes of `flat`, and names those who are missing when it fails.

        `wire`: bytes handed to others, where no table of `sent_bytes` has them. `peer`: of a message.
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
        self, operation: str, purpose: str, payload: int, flat: Tensor, call: Callable[[Transport], None], peer: int | None = None
    ) -> None:
        started = time.monotonic()
        under_way = self._open.begin(_what(operation, purpose), self._calls, peer) if self._open is not None else None
        try:
            transport = self.transports["cuda" if flat.is_cuda else "cpu"]
            if not self.ledger.recording:
                call(transport)
                return
            with self.ledger.span("comm", purpose or operation, payload, "transfer"):
                call(transport)
        except RuntimeError as error:
            if under_way is not None:
                under_way.failed = True
            raise LaunchError(self._autopsy(operation, purpose, time.monotonic() - started, error)) from error
        finally:
            if self._open is not None:
                self._open.end()

    def _fits(self, operation: str, whole: Tensor | None, cut: Tensor) -> None:
        elements = 0 if whole is None else whole.numel()
        if elements != self.size * cut.numel():
            raise ValueError(
                f"{operation} in group {self.name} of {self.size} ranks: the whole has {elements} elements, a rank's cut {cut.numel()}; "
                f"the whole must have {self.size} x {cut.numel()} = {self.size * cut.numel()}"
            )

    def _splits(self, name: str, flat: Tensor, splits: Sequence[int] | None) -> list[int]:
        if splits is None:
            if flat.numel() % self.size:
                raise ValueError(f"all_to_all of {flat.numel()} elements over {self.size} ranks is not even: give {name}")
            return [flat.numel() // self.size] * self.size
        if len(splits) != self.size or sum(splits) != flat.numel():
            raise ValueError(
                f"{name} {list(splits)} must be {self.size} counts that add up to the tensor's {flat.numel()} elements"
            )
        return list(splits)

    def _autopsy(self, operation: str, purpose: str, waited: float, error: RuntimeError) -> str:
        """Says what failed; where there is a store, calls the roll of the ranks that stopped too, so that it can name the others."""
        what = _what(operation, purpose)
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        if operation in _MESSAGES:
            where, roll = f"in group {self.name}, {what}", ""
        else:
            where, roll = f"collective {self._calls} of group {self.name}, {what}", self._roll_call()
        return f"rank {self.ranks[self.rank]}: {where}, failed after {waited:.1f} s; {roll}Cause: {cause}"

    def _roll_call(self) -> str:
        if self._store is None or self._failed:
            return ""
        self._failed = True
        missing = []
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        with suppress(RuntimeError):
            self._store.set(f"stopped/{self._calls}/{self.rank}", "1")
        for rank in range(self.size):
            here = False
            with suppress(RuntimeError):  # a store whose server is gone answers nothing: that rank counts as missing
                while not (here := self._store.check([f"stopped/{self._calls}/{rank}"])) and time.monotonic() < deadline:
                    time.sleep(0.05)
            if not here:
                missing.append(self.ranks[rank])
        return f"not there: rank {', '.join(map(str, missing))}. " if missing else "every rank stopped here. "


def _what(operation: str, purpose: str) -> str:
    return f"{operation} ({purpose})" if purpose else operation


def _packed(value: Any) -> tuple[Tensor, int]:
    """The bytes of `value` and their number; those of the error, and the number negative, where it cannot travel: all ranks are to raise it."""
    try:
        data, sign = wire.pack(value), 1
    except Exception as error:
        data, sign = wire.pack(error), -1
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), sign * len(data)


def _unpacked(data: Tensor, size: int) -> Any:
    value = wire.unpack(data[: abs(size)].numpy().tobytes())
    if size < 0:
        raise value
    return value

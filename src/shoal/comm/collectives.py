"""A group of ranks and its collectives: blocking, in place, on torch's process groups but never on the default one.

On CUDA an operation is ordered on the current stream and does not block the host. On the CPU the ranks of one host reduce through shared
memory (see shm), where that can be had.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.ledger import Ledger
from shoal.comm.shm import Shared
from shoal.errors import LaunchError

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_ROLL_CALL_SECONDS = 2.0


class Group:
    """Some ranks of a World, in order; `rank` is this rank's place among them.

    Made by `World.group` only. A group of one rank does nothing and needs no store. A collective that fails raises LaunchError
    with the operation and the ranks that did not come to it.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        rank: int,
        ledger: Ledger,
        store: dist.Store | None = None,
        device: torch.device | None = None,
        loopback: bool = False,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self.name, self.ranks, self.rank, self.size = name, ranks, rank, len(ranks)
        self.ledger = ledger
        self._calls = 0
        if self.size == 1:
            return
        assert store is not None and device is not None
        self._store = store
        self._cpu = _gloo(dist.PrefixStore("gloo", store), rank, self.size, loopback, timeout)
        self._shared = Shared.open(store, rank, self.size, timeout) if loopback else None
        self._cuda = _nccl(dist.PrefixStore("nccl", store), rank, self.size, timeout) if device.type == "cuda" else None

    def all_reduce(self, tensor: Tensor, op: str = "sum", purpose: str = "") -> Tensor:
        """Replaces `tensor` on every rank by the `op` ("sum", "min", "max", "product") over the ranks; returns it."""
        if self.size > 1 and self._shared is not None and not tensor.is_cuda and tensor.is_contiguous():
            shared = self._shared
            self._guard("all_reduce", tensor, purpose, lambda: shared.all_reduce(tensor.view(-1), op))
        else:
            self._run("all_reduce", tensor, purpose, lambda pg: pg.allreduce([tensor], _REDUCTIONS[op]))
        return tensor

    def broadcast(self, tensor: Tensor, src: int = 0, purpose: str = "") -> Tensor:
        """Copies the `tensor` of the group's rank `src` to all; returns it."""
        self._run("broadcast", tensor, purpose, lambda pg: pg.broadcast(tensor, src))
        return tensor

    def all_gather(self, out: Tensor, tensor: Tensor, purpose: str = "") -> Tensor:
        """Fills `out` (size * numel, contiguous) with every rank's `tensor` in rank order; returns it."""
        if self.size == 1:
            out.view(-1).copy_(tensor.reshape(-1))
            return out
        self._run("all_gather", tensor, purpose, lambda pg: pg._allgather_base(out, tensor))
        return out

    def reduce_scatter(self, out: Tensor, tensor: Tensor, purpose: str = "") -> Tensor:
        """Fills `out` with this rank's even cut of the sum of `tensor` (size * out.numel()) over the ranks; returns it."""
        if self.size == 1:
            out.view(-1).copy_(tensor.reshape(-1))
            return out
        self._run("reduce_scatter", tensor, purpose, lambda pg: pg._reduce_scatter_base(out, tensor))
        return out

    def barrier(self) -> None:
        """Returns when every rank has come."""
        self.all_reduce(torch.zeros(1), purpose="barrier")

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order."""
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.all_gather(torch.empty(self.size, dtype=torch.int64), torch.tensor([mine.numel()])).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        rows = self.all_gather(torch.empty(self.size * max(sizes), dtype=torch.uint8), padded).view(self.size, -1)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """The picklable `value` of the group's rank `src`."""
        if self.size == 1:
            return value
        data = torch.frombuffer(bytearray(pickle.dumps(value if self.rank == src else None)), dtype=torch.uint8)
        size = self.broadcast(torch.tensor([data.numel()]), src)
        if self.rank != src:
            data = torch.empty(int(size), dtype=torch.uint8)
        return pickle.loads(self.broadcast(data, src).numpy().tobytes())

    def close(self) -> None:
        """Ends the connections; no collective can follow."""
        if self.size > 1 and self._cuda is not None:
            self._cuda.shutdown()
        self._cpu = self._cuda = self._shared = None

    def _run(self, operation: str, tensor: Tensor, purpose: str, call: Callable[[Any], dist.Work]) -> None:
        if self.size > 1:
            pg = self._cuda if tensor.is_cuda else self._cpu
            self._guard(operation, tensor, purpose, lambda: call(pg).wait())

    def _guard(self, operation: str, tensor: Tensor, purpose: str, call: Callable[[], object]) -> None:
        """Books and times one collective, and names those who are missing when it fails."""
        payload = tensor.numel() * tensor.element_size()
        self._calls += 1
        self.ledger.count(self.name, operation, payload)
        started = time.monotonic()
        try:
            with self.ledger.span("comm", purpose or operation, payload):
                call()
        except RuntimeError as error:
            raise LaunchError(self._autopsy(operation, purpose, time.monotonic() - started, error)) from error

    def _autopsy(self, operation: str, purpose: str, waited: float, error: RuntimeError) -> str:
        """Calls the roll of the ranks that also stopped at this collective, so that the message names the others."""
        self._store.set(f"stopped/{self._calls}/{self.rank}", "1")
        missing = []
        deadline = time.monotonic() + _ROLL_CALL_SECONDS
        for rank in range(self.size):
            here = False
            with suppress(RuntimeError):  # a store whose server is gone answers nothing: that rank counts as missing
                while not (here := self._store.check([f"stopped/{self._calls}/{rank}"])) and time.monotonic() < deadline:
                    time.sleep(0.05)
            if not here:
                missing.append(self.ranks[rank])
        what = f"{operation} ({purpose})" if purpose else operation
        who = f"not there: rank {', '.join(map(str, missing))}" if missing else "every rank stopped here"
        cause = str(error).splitlines()[0]
        return (
            f"rank {self.ranks[self.rank]}: collective {self._calls} of group {self.name}, {what}, "
            f"failed after {waited:.1f} s; {who}. Cause: {cause}"
        )


def _gloo(store: dist.Store, rank: int, size: int, loopback: bool, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    gloo = dist.ProcessGroupGloo
    options._devices = [gloo.create_device(hostname="127.0.0.1") if loopback else gloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)

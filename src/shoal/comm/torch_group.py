"""Groups over process groups of torch.distributed, of any backend, for loops whose ranks torch has connected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shoal.comm.alone import Alone
from shoal.comm.collectives import Group
from shoal.comm.ledger import Ledger
from shoal.comm.reductions import TORCH_OPS, finish
from shoal.comm.transport import NoSharedMemory, Transport, for_every_device

_OPS = {**TORCH_OPS, "avg": dist.ReduceOp.SUM}  # gloo has no average

# torch before 2.13 calls them by other names.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def open_group(pg: dist.ProcessGroup, name: str, members: Sequence[int], ledger: Ledger) -> Group:
    """Opens a group of the ranks `members` of `pg`, over a new process group; all of them call it.

    The process group is new because collectives from two threads on one process group would come in a different order
    on each rank. CPU tensors go over gloo where the backend of `pg` cannot carry them.
    """
    known = dist.get_process_group_ranks(pg)
    ranks = [known[member] for member in members]
    if len(ranks) == 1:
        return Group(name, ranks, ledger, for_every_device(Alone()))
    backend = dist.get_backend_config(pg)
    devices = dist.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    own = _new_group(ranks, backend, name)
    transports: dict[str, Transport] = dict.fromkeys(devices, own)
    if "cpu" not in transports:
        transports["cpu"] = _new_group(ranks, "gloo", name)
    return Group(name, ranks, ledger, transports)


def _new_group(ranks: list[int], backend: str, name: str) -> TorchGroup:
    return TorchGroup(
        dist.new_group(ranks, backend=backend, use_local_synchronization=True, group_desc=f"shoal {name}")
    )


class TorchGroup(NoSharedMemory):
    """A `transport.Transport` over a process group that belongs to the caller: `close` leaves it open.

    The backend determines how and in which order it reduces.
    """

    carrier = "torch.distributed"

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg
        self.rank, self.size = dist.get_rank(pg), dist.get_world_size(pg)

    def all_reduce(self, flat: Tensor, op: str) -> None:
        dist.all_reduce(flat, _OPS[op], self._pg)
        finish(flat, op, self.size)

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        _reduce_scatter(out, flat, _OPS[op], self._pg)
        finish(out, op, self.size)

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        _all_gather(out, flat, self._pg)

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        dist.all_to_all_single(out, flat, list(out_splits), list(in_splits), self._pg)

    def broadcast(self, flat: Tensor, src: int) -> None:
        dist.broadcast(flat, group=self._pg, group_src=src)

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        cuts = None if flat is None else list(flat.split(out.numel()))
        dist.scatter(out, cuts, group=self._pg, group_src=src)

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        cuts = None if out is None else list(out.split(flat.numel()))
        dist.gather(flat, cuts, group=self._pg, group_dst=dst)

    def send(self, flat: Tensor, dst: int) -> None:
        dist.send(flat, group=self._pg, group_dst=dst)

    def recv(self, flat: Tensor, src: int) -> None:
        dist.recv(flat, group=self._pg, group_src=src)

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        """Sends and receives in one batch, the receive posted first, so that a circle of ranks does not deadlock."""
        if source == target == self.rank:
            out.copy_(flat)
            return
        receive = dist.P2POp(dist.irecv, out, group=self._pg, group_peer=source)
        send = dist.P2POp(dist.isend, flat, group=self._pg, group_peer=target)
        for work in dist.batch_isend_irecv([receive, send]):
            work.wait()

    def barrier(self) -> None:
        dist.barrier(self._pg)

    def close(self) -> None:
        pass

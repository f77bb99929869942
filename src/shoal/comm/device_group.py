"""The transport of accelerators: collectives of the process group that torch has for them, ordered on the current
stream; the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.reductions import TORCH_OPS
from shoal.comm.transport import NoSharedMemory
from shoal.device import finish, group_backend
from shoal.errors import UserError


class DeviceGroup(NoSharedMemory):
    """A `transport.Transport` over `pg`, a process group of torch.distributed (see `open`), for tensors on `device`."""

    def __init__(self, pg: Any, device: torch.device) -> None:
        self._pg, self._device = pg, device
        self.rank, self.size = pg.rank(), pg.size()

    @classmethod
    def open(cls, store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Self:
        """Opens the process group that torch registers for the kind of `device`. Raises UserError where there is
        none."""
        backend = (group_backend(device) or "no").upper()
        if (plugin := dist.Backend._plugins.get(backend)) is not None:
            return cls(_of_plugin(plugin, store, rank, size, timeout), device)
        own = getattr(dist.distributed_c10d, f"ProcessGroup{backend}", None)
        if own is None or backend == "GLOO":  # which would copy to the host and wait
            raise UserError(
                f"a group of {size} ranks on {device}: torch.distributed has no process group for these devices (see "
                'torch.distributed.Backend.register_backend). Train on the CPU: World(device="cpu")'
            )
        options = own.Options()
        options._timeout = timeout
        if hasattr(options, "is_high_priority_stream"):
            # Computation that is queued already must not hold back what other ranks wait for.
            options.is_high_priority_stream = True
        return cls(own(store, rank, size, options), device)

    @classmethod
    def of_two(cls, store: dist.Store, rank: int, device: torch.device, timeout: timedelta) -> Self:
        """Opens a group of this rank, 0 or 1, and one other, whose death is this one's to notice and to live on
        after."""
        return cls.open(store, rank, 2, device, timeout)

    @property
    def carrier(self) -> str:
        return (group_backend(self._device) or "").upper()

    def all_reduce(self, flat: Tensor, op: str) -> None:
        self._pg.allreduce([flat], TORCH_OPS[op]).wait()

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = TORCH_OPS[op]  # type: ignore[assignment]
        self._pg._reduce_scatter_base(out, flat, options).wait()

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        self._pg._allgather_base(out, flat).wait()

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        self._pg.alltoall_base(out, flat, list(out_splits), list(in_splits)).wait()

    def broadcast(self, flat: Tensor, src: int) -> None:
        self._pg.broadcast(flat, src).wait()

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        """Scatters by an all-to-all in which only `src` sends, so that one kernel carries all cuts."""
        cut = out.numel()
        sends = [cut] * self.size if self.rank == src else [0] * self.size
        receives = [cut if rank == src else 0 for rank in range(self.size)]
        self.all_to_all(out, flat if self.rank == src and flat is not None else out.new_empty(0), receives, sends)

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        """Gathers by an all-to-all in which only `dst` receives."""
        cut = flat.numel()
        sends = [cut if rank == dst else 0 for rank in range(self.size)]
        receives = [cut] * self.size if self.rank == dst else [0] * self.size
        self.all_to_all(out if self.rank == dst and out is not None else flat.new_empty(0), flat, receives, sends)

    def send(self, flat: Tensor, dst: int) -> None:
        self._pg.send([flat], dst, 0).wait()

    def recv(self, flat: Tensor, src: int) -> None:
        self._pg.recv([flat], src, 0).wait()

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        """Sends and receives in one group of calls: two kernels one after the other would deadlock in a circle."""
        if source == target == self.rank:
            out.copy_(flat)
            return
        if not self._pg.supports_coalescing:
            for work in (self._pg.recv([out], source, 0), self._pg.send([flat], target, 0)):
                work.wait()
            return
        self._pg._start_coalescing()
        self._pg.send([flat], target, 0)
        self._pg.recv([out], source, 0)
        self._pg._end_coalescing().wait()

    def barrier(self) -> None:
        """Waits until every rank has come, on the host too, unlike the other operations."""
        self.all_reduce(torch.zeros(1, device=self._device), "sum")
        finish(self._device)

    def close(self) -> None:
        self._pg.shutdown()

    def abort(self) -> None:
        """Gives up what is under way, from any thread: for a group whose other ranks may be gone."""
        self._pg.abort()


def _of_plugin(plugin: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Makes a process group of an extension of torch, as torch itself does for the groups that it keeps account of."""
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    about = dist.distributed_c10d._DistributedBackendOptions()
    about.store, about.timeout = store, timeout
    about.group_rank, about.group_size, about.global_ranks_in_group = rank, size, list(range(size))
    return plugin.creator_fn(about, None)

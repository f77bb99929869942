"""The torch.distributed backend "shm": `import shoal.comm`, then `init_process_group("shm")` or `"cpu:shm"`.

It serves the CPU ranks of one host. torch accepts a process group written in Python only as the whole group, so it
cannot be combined with another backend ("cpu:shm,cuda:nccl" would leave CUDA without one). Messages between two ranks
arrive in the order in which they were sent: receiving a tag out of order is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.alone import Alone
from shoal.comm.backend_group import ANY, OrderedProcessGroup
from shoal.comm.flat import flat_of, write_back
from shoal.comm.reductions import TORCH_OPS
from shoal.comm.shm import Shared
from shoal.comm.signed import signed
from shoal.comm.sparse import sum_sparse
from shoal.errors import UserError

_OPS = {op: name for name, op in TORCH_OPS.items()}


def register() -> None:
    """Registers the backend "shm" with torch.distributed."""
    if "SHM" not in dist.Backend._plugins:
        dist.Backend.register_backend("shm", _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SharedProcessGroup:
    own = signed(store)
    transport = Shared.open(own, rank, size, timeout) if size > 1 else Alone()
    if transport is None:
        raise UserError(
            f'rank {rank} of {size}: the backend "shm" is for ranks of one host that can share memory, and one of them '
            'cannot (rank 0\'s warning says why). Use the backend "gloo"'
        )
    group = SharedProcessGroup(store, rank, size, transport)
    group.signed = own  # kept as long as the group, since a PrefixStore does not keep it alive
    return group


class SharedProcessGroup(OrderedProcessGroup):
    """torch's collectives over shared memory."""

    signed: dist.Store

    # Reductions

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        op = _op(opts)

        def run() -> None:
            for tensor in tensors:
                self._reduce_all(tensor, op)

        return self._collective(opts, tensors, run)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        op, tensor = _op(opts), tensors[0]
        target = tensor if opts.rootRank == self.rank() else tensor.detach().clone()
        return self._collective(opts, tensors, lambda: self._reduce_all(target, op))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        op = _op(opts)

        def run() -> None:
            for out, parts in zip(outputs, inputs, strict=True):
                self._scatter_sum(out, [part.numel() for part in parts], _joined(parts), op)

        return self._collective(opts, outputs, run)

    def reduce_scatter_single(self, out: Tensor, flat: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([out], [flat], opts)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], flats: list[Tensor], opts: Any = None) -> dist.Work:
        op = _op(opts)

        def run() -> None:
            for out, flat in zip(outs, flats, strict=True):
                self._scatter_sum(out, [out.numel()] * self.size(), _flat(flat), op)

        return self._collective(opts, outs, run)

    # Copies

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        def run() -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                self._transport.broadcast(flat, opts.rootRank)
                write_back(tensor, flat)

        return self._collective(opts, tensors, run)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def run() -> None:
            for outs, tensor in zip(outputs, inputs, strict=True):
                _write_all(outs, self._gathered(tensor))

        return self._collective(opts, outputs, run)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """Gathers several tensors; `outputs` has a list for each rank, with a tensor for each of `inputs`."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, out: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([out], [tensor], opts)

    def all_gather_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> dist.Work:
        def run() -> None:
            for out, tensor in zip(outs, tensors, strict=True):
                into = _flat(out)
                self._transport.all_gather(into, _flat(tensor))
                write_back(out, into)

        return self._collective(opts, outs, run)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        def run() -> None:
            flat, root = _flat(inputs[0]), opts.rootRank
            into = flat.new_empty(self.size() * flat.numel()) if root == self.rank() else None
            self._transport.gather(into, flat, root)
            if into is not None:
                _write_all(outputs[0], into)

        return self._collective(opts, outputs, run)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        def run() -> None:
            into, root = _flat(outputs[0]), opts.rootRank
            self._transport.scatter(into, _joined(inputs[0]) if root == self.rank() else None, root)
            write_back(outputs[0], into)

        return self._collective(opts, outputs, run)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def run() -> None:
            receives = [out.numel() for out in outputs]
            into = outputs[0].new_empty(sum(receives))
            self._transport.all_to_all(into, _joined(inputs), receives, [tensor.numel() for tensor in inputs])
            _write_all(outputs, into)

        return self._collective(opts, outputs, run)

    def all_to_all_single(
        self, out: Tensor, tensor: Tensor, out_splits: list[int] | None, in_splits: list[int] | None, opts: Any = None
    ) -> dist.Work:
        receives, sends = self._splits(out, out_splits), self._splits(tensor, in_splits)

        def run() -> None:
            into = _flat(out)
            self._transport.all_to_all(into, _flat(tensor), receives, sends)
            write_back(out, into)

        return self._collective(opts, [out], run)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._collective(opts, [], self._transport.barrier)

    # Messages

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        flat = _flat(tensors[0])
        return self._message("send", dst, tensors, lambda: self._transport.send(flat, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        def run() -> None:
            flat = _flat(tensors[0])
            self._transport.recv(flat, src, tag)
            write_back(tensors[0], flat)

        return self._message("recv", src, tensors, run)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        flat, source = _flat(tensors[0]), -1

        def run() -> None:
            nonlocal source
            source = self._transport.recv_any(flat, tag)
            write_back(tensors[0], flat)

        return self._message("recv", ANY, tensors, run, lambda: source)

    # torch before 2.13 calls these operations by other names
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _reduce_all(self, tensor: Tensor, op: str) -> None:
        if tensor.is_sparse:
            sum_sparse(self._transport, tensor, op)
            return
        flat = _flat(tensor)
        self._transport.all_reduce(flat, op)
        write_back(tensor, flat)

    def _scatter_sum(self, out: Tensor, sizes: list[int], flat: Tensor, op: str) -> None:
        if len(set(sizes)) == 1:
            into = _flat(out)
            self._transport.reduce_scatter(into, flat, op)
        else:
            whole = flat.clone()
            self._transport.all_reduce(whole, op)
            into = whole.split(sizes)[self.rank()]
        write_back(out, into)

    def _gathered(self, tensor: Tensor) -> Tensor:
        flat = _flat(tensor)
        into = flat.new_empty(self.size() * flat.numel())
        self._transport.all_gather(into, flat)
        return into

    def _splits(self, tensor: Tensor, splits: Sequence[int] | None) -> list[int]:
        """Returns the elements of `tensor` for each rank. `splits`: rows for each rank; None or empty for even ones."""
        if splits:
            row = tensor.numel() // max(1, tensor.size(0))
            return [count * row for count in splits]
        return [tensor.numel() // self.size()] * self.size()


def _op(opts: Any) -> str:
    op = "sum" if opts is None else _OPS.get(opts.reduceOp.op)
    if op is None:
        raise NotImplementedError(f'the backend "shm" reduces by {", ".join(_OPS.values())}, not by {opts.reduceOp}')
    return op


def _flat(tensor: Tensor) -> Tensor:
    """Returns the elements as a contiguous 1-D tensor: a view where possible, else a copy (see `flat.flat_of`)."""
    if tensor.is_sparse or tensor.device.type != "cpu":
        raise TypeError(f'the backend "shm" is for dense CPU tensors, not for a {tensor.layout} one on {tensor.device}')
    return flat_of(tensor)


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([_flat(tensor) for tensor in tensors])


def _write_all(tensors: list[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        write_back(tensor, part)

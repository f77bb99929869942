"""The transport of the CPU ranks of one host: collectives through shared memory, in C (native/shm.c and native/mail.c).

An operation is one call into C, which calls back here every tenth of a second of waiting, to check whether the awaited
rank still lives. Every element is reduced in rank order, so all ranks get the same bits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.shm_allocate import Allocations
from shoal.comm.shm_reductions import reduction
from shoal.comm.shm_segment import MOST_TEXT, meeting_in, open_segment
from shoal.comm.shm_watch import FAILED, LEFT, Look, Watch
from shoal.comm.transport import Unlike
from shoal.comm.turns import Turns
from shoal.native import library

_OF_OUT = 1 << 62  # as OF_OUT in native/shm.c
_ALL_TO_ALL, _SCATTER, _GATHER = -1, -2, -3  # tags of messages
_LOOK_SECONDS = 0.1  # between looks at the processes of the awaited ranks
_REST_SECONDS = 2e-4  # between looks for a message of any rank


class Shared:
    """One rank's end of the shared memory of `size` ranks, a `transport.Transport`. All call `open` to make it.

    Collectives come one at a time, in the same order on all ranks: the caller sees to that (`turns.Turns`). Messages
    (`send`, `recv`, `exchange`) may be under way meanwhile, from any thread. A failure ends the transport: all later
    operations, of every rank, raise RuntimeError.
    """

    carrier = "shared memory"
    compares = True

    def __init__(self, view: _View, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._view: _View | None = view
        self._allocations = Allocations(rank, size)
        self._turns = {(peer, sends): Turns() for peer in range(size) for sends in (True, False)}  # of messages
        kernels = library()
        assert kernels is not None
        self._c = kernels

    @classmethod
    def open(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Shared | None:
        """Opens the shared memory of all ranks; returns None, on every rank, where one cannot have it (rank 0 warns).

        `timeout`: how long an operation waits for a rank that lives.
        """
        kernels = library()
        num_bytes = kernels.shoal_shm_bytes(size) if kernels else 0
        obstacle = "" if kernels else f"rank {rank} does not have the native kernels (`shoal doctor` says more)"
        meet = meeting_in(dist.PrefixStore("segment", store), rank, size)
        segment = open_segment(meet, rank, num_bytes, obstacle)
        if segment is None or kernels is None:
            return None
        watch = Watch(segment.pids, timeout.total_seconds())
        look = Look(watch.look)
        bytes_ = torch.frombuffer(segment.memory, dtype=torch.uint8)
        state = ctypes.create_string_buffer(kernels.shoal_shm_view_bytes())
        kernels.shoal_shm_open(state, bytes_.data_ptr(), rank, size, ctypes.cast(look, ctypes.c_void_p))
        return cls(_View(state, ctypes.addressof(state), bytes_, look, watch), rank, size)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a zeroed 1-D tensor in shared memory; None, on every rank, if one cannot have it (rank 0 warns).

        All ranks call it with the same arguments. `all_reduce`, `reduce_scatter` (its `flat`) and `all_gather` (its
        `out`, or its `flat`) on the same elements of such tensors copy nothing in or out; the result has the same bits.
        """
        return self._allocations.allocate(self._meet, numel, dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a zeroed 1-D tensor in the same memory on all ranks; None, on every rank, if one cannot have it."""
        return self._allocations.common(self._meet, numel, dtype)

    def _meet(self, text: str) -> list[str]:
        """Gives the texts of all ranks, of at most MOST_TEXT bytes, in a fraction of the time that a store takes."""
        mine = torch.frombuffer(bytearray(text.encode().ljust(MOST_TEXT)), dtype=torch.uint8)
        texts = torch.empty(self.size, MOST_TEXT, dtype=torch.uint8)
        self.all_gather(texts.view(-1), mine)
        return [bytes(each.numpy()).decode() for each in texts]

    def all_reduce(self, flat: Tensor, op: str) -> None:
        flat, dtype, code = reduction(flat, op)
        bases, place = self._allocations.place(flat)
        view = self._usable()
        result = self._c.shoal_shm_all_reduce(view.address, flat.data_ptr(), flat.nbytes, dtype, code, bases, place)
        self._check(view, "all_reduce", result)

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        flat, dtype, code = reduction(flat, op)
        self._fits(out, flat)
        bases, place = self._allocations.place(flat)
        start, cut = flat.data_ptr(), out.data_ptr() - flat.data_ptr()
        if place and 0 <= cut < flat.nbytes and cut != self.rank * out.nbytes:
            bases, place = None, 0  # `out` is a part of `flat` that other ranks still read
        view = self._usable()
        result = self._c.shoal_shm_reduce_scatter(
            view.address, out.data_ptr(), start, out.nbytes, dtype, code, bases, place
        )
        self._check(view, "reduce_scatter", result)

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        self.all_gather_alike(out, flat, 0)

    def all_gather_alike(self, out: Tensor, flat: Tensor, number: int) -> None:
        """Gathers as `all_gather` does, where all have the same number (see `transport.Compares`); 0: none is asked."""
        self._fits(flat, out)
        bases, place = self._allocations.place(out)
        if place:
            place |= _OF_OUT
        else:
            bases, place = self._allocations.place(flat)
        view = self._usable()
        result = self._c.shoal_shm_all_gather(
            view.address, out.data_ptr(), flat.data_ptr(), flat.nbytes, bases, place, number
        )
        if result < 0 and number:
            numbers = [self._c.shoal_shm_number_of(view.address, rank) for rank in range(self.size)]
            if all(numbers) and any(each != number for each in numbers):
                raise Unlike(numbers)
        self._check(view, "all_gather", result)

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        ins, outs = list(_cuts(flat, in_splits)), list(_cuts(out, out_splits))
        outs[self.rank].copy_(ins[self.rank])
        sends = [_send(ins[rank], rank, _ALL_TO_ALL) for rank in self._others()]
        self._mail("all_to_all", *sends, *(_recv(outs[rank], rank, _ALL_TO_ALL) for rank in self._others()))

    def broadcast(self, flat: Tensor, src: int) -> None:
        assert flat.is_contiguous()
        view = self._usable()
        self._check(view, "broadcast", self._c.shoal_shm_broadcast(view.address, flat.data_ptr(), flat.nbytes, src))

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        if self.rank != src:
            self._mail("scatter", _recv(out, src, _SCATTER))
            return
        assert flat is not None, "the root brings the tensor to scatter"
        self._fits(out, flat)
        cuts = flat.view(self.size, out.numel())
        out.copy_(cuts[src])
        self._mail("scatter", *(_send(cuts[rank], rank, _SCATTER) for rank in self._others()))

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        if self.rank != dst:
            self._mail("gather", _send(flat, dst, _GATHER))
            return
        assert out is not None, "the root brings the tensor to gather into"
        self._fits(flat, out)
        cuts = out.view(self.size, flat.numel())
        cuts[dst].copy_(flat)
        self._mail("gather", *(_recv(cuts[rank], rank, _GATHER) for rank in self._others()))

    def send(self, flat: Tensor, dst: int, tag: int = 0) -> None:
        with self._turns[dst, True]:
            self._mail("send", _send(flat, dst, tag))

    def recv(self, flat: Tensor, src: int, tag: int = 0) -> None:
        with self._turns[src, False]:
            self._mail("recv", _recv(flat, src, tag))

    def recv_any(self, flat: Tensor, tag: int = 0) -> int:
        """Fills `flat` with the next message of this tag from any rank; returns the sender.

        Later receives wait for it.
        """
        with ExitStack() as stack:
            for rank in range(self.size):
                stack.enter_context(self._turns[rank, False])
            source = self._first_sender(tag)
            self._mail("recv", _recv(flat, source, tag))
            return source

    def _first_sender(self, tag: int) -> int:
        """Polls all ranks for a message, since C waits for one rank at a time; returns the first sender.

        Ranks that have closed the group are waited for only if there are no others.
        """
        started = looked = time.monotonic()
        while True:
            view, now = self._usable(), time.monotonic()
            stopped = {}
            for rank in self._others():
                why = ctypes.c_int64()
                if self._c.shoal_shm_has_come(view.address, rank, tag, ctypes.addressof(why)):
                    return rank
                stopped[rank] = why.value
            if now - looked >= _LOOK_SECONDS:
                looked = now
                for rank in [rank for rank in stopped if stopped[rank] != LEFT] or stopped:
                    go_on = (ctypes.c_int64 * 1)()
                    view.watch.look(rank, int((now - started) * 1e9), stopped[rank], go_on)
                    self._check(view, "recv", 0 if go_on[0] else 1 + rank)
            time.sleep(_REST_SECONDS)

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        with self._turns[target, True], self._turns[source, False]:
            self._mail("exchange", _send(flat, target, 0), _recv(out, source, 0))

    def barrier(self) -> None:
        view = self._usable()
        self._check(view, "barrier", self._c.shoal_shm_barrier(view.address))

    def close(self) -> None:
        """Releases the memory. Ranks that wait for this one raise; so do this one's operations in other threads."""
        view, self._view = self._view, None  # another thread may close it, too: the memory stays until this returns
        if view is not None:
            view.watch.ended = "the group has been closed"
            self._c.shoal_shm_stop(view.address, LEFT)

    def _others(self) -> list[int]:
        """The other ranks, beginning with the one after this rank."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _fits(self, cut: Tensor, whole: Tensor) -> None:
        assert cut.is_contiguous() and whole.is_contiguous() and cut.nbytes * self.size == whole.nbytes

    def _mail(self, operation: str, *parcels: tuple[int, ...]) -> None:
        view = self._usable()
        fields = [field for parcel in parcels for field in parcel]
        table = (ctypes.c_int64 * len(fields))(*fields)
        result = self._c.shoal_shm_mail(view.address, table, len(parcels))
        detail = ""
        if result < 0:
            rows = [table[6 * i : 6 * i + 6] for i in range(len(parcels))]
            came, wanted = next(
                (row, parcel)
                for row, parcel in zip(rows, parcels, strict=True)
                if not parcel[4] and tuple(row[1:4]) != parcel[1:4]
            )
            detail = (
                f": a message of {came[1]} bytes with tag {came[3]} came, "
                f"{wanted[1]} bytes with tag {wanted[3]} were expected"
            )
        self._check(view, operation, result, detail)

    def _usable(self) -> _View:
        if self._view is None:
            raise RuntimeError("the group has been closed")
        if self._view.watch.ended:
            raise RuntimeError(f"the group cannot be used any more: {self._view.watch.ended}")
        return self._view

    def _check(self, view: _View, operation: str, result: int, detail: str = "") -> None:
        """Raises the error that made an operation fail; `result` is that of the C function."""
        if result == 0:
            return
        if result > 0:
            error, reason = view.watch.given_up()
        else:
            what = detail or " (operation, dtype, size or root)"
            error = RuntimeError(f"{operation} does not fit what the group's rank {-1 - result} called{what}")
            reason = FAILED
        view.watch.ended = view.watch.ended or str(error)
        self._c.shoal_shm_stop(view.address, reason)
        raise error


@dataclass(frozen=True)
class _View:
    """State of a running operation: it stays in the operation's frame if the transport is closed meanwhile."""

    state: ctypes.Array[ctypes.c_char]
    address: int
    memory: Tensor
    look: object
    watch: Watch


def _cuts(flat: Tensor, splits: Sequence[int]) -> list[Tensor]:
    """Splits `flat`: cheaper than `Tensor.split` for a handful of ranks, and it takes any sequence."""
    return [flat[stop - count : stop] for count, stop in zip(splits, accumulate(splits), strict=True)]


def _send(flat: Tensor, rank: int, tag: int) -> tuple[int, ...]:
    assert flat.is_contiguous()
    return flat.data_ptr(), flat.nbytes, rank, tag, 1, 0


def _recv(flat: Tensor, rank: int, tag: int) -> tuple[int, ...]:
    assert flat.is_contiguous()
    return flat.data_ptr(), flat.nbytes, rank, tag, 0, 0

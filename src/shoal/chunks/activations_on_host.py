"""What backward keeps of the forward, waiting on the host: copied there while the forward goes on, back while backward does.

    forward     save a, save b, save c ...        a goes to the host beside what is computed; the device's memory of it is free then
    backward    ... uses c, uses b, uses a        whatever is used, the one saved before it is on its way

The part of a pass that is saved first goes, the rest is needed again soon. A storage goes once, however many tensors of it are saved.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.chunks.activations import ROLE, Activations
from shoal.chunks.tier import Tier
from shoal.comm import Lane
from shoal.comm.lane import Ticket
from shoal.errors import UserError

BUFFERS = 2
"""So many are on their way to the host at a time."""
WORTH = 1 << 14
"""Bytes: what is smaller stays; a copy would cost more than it frees."""


@dataclass(eq=False)
class Away:
    """A storage on the host: `flat` are its bytes there; `here` the same on the device while it is wanted. `earlier`: the one saved before it."""

    nbytes: int
    flat: Tensor
    earlier: weakref.ref[Away] | None
    here: weakref.ref[Tensor] | None = None
    fetched: Ticket | None = None
    ahead: Tensor | None = None  # fetched before anybody has asked for it


@dataclass(frozen=True)
class Saved:
    """A tensor of such a storage."""

    away: Away
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OnHost:
    """Sends `share` of the bytes that backward keeps of each microbatch to the host, on `lane`. The first microbatch says how many there
    are; of it all go.

    `host` is the tier there; `count` counts what is on the device, on a CPU.
    """

    def __init__(self, share: float, lane: Lane, host: Tier, count: Activations | None) -> None:
        self._share, self._lane, self._host, self._count = share, lane, host, count
        self._known: dict[int, tuple[StorageWeakRef, int, weakref.ref[Away]]] = {}
        self._last: weakref.ref[Away] | None = None
        self._all: int | None = None
        self._so_far = 0
        self._stands_for: Tensor | None = None
        self._leaving: deque[tuple[Ticket, Tensor, Tensor, int]] = deque()  # counted on the device until they have gone
        self._in_use: list[Tensor] = []  # of the node of the graph that runs now
        self.bytes_out = self.bytes_in = 0

    def begin(self) -> None:
        """A backward is over: what is saved now is of another microbatch."""
        self._stands_for = None
        if self._so_far:
            self._all, self._so_far = max(self._all or 0, self._so_far), 0  # the last batch may be short
        self._known.clear()
        self._in_use.clear()
        self._last = None

    def _let_go(self, at_most: int) -> None:
        """What has gone is not on the device any more; where more than `at_most` are on their way, waits for those."""
        while self._leaving and (self._leaving[0][0].done or len(self._leaving) > at_most):
            ticket, _, tensor, version = self._leaving.popleft()
            ticket.wait()
            check_unchanged(tensor, version)

    def save(self, tensor: Tensor) -> Saved | None:
        """Sends `tensor`, unless it is to stay (None)."""
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size < WORTH or torch._C._current_graph_task_id() != -1:  # recomputed in backward: used at once
            return None
        found = self._known.get(storage._cdata)
        away = found[2]() if found is not None and not found[0].expired() and found[1] == tensor._version else None
        if away is None:
            self._so_far += size
            if self._all is not None and self._share < 1 and self._so_far > self._share * self._all:
                return None
            away = self._send(tensor)
            self._known[storage._cdata] = (StorageWeakRef(storage), tensor._version, weakref.ref(away))
        return Saved(away, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _send(self, tensor: Tensor) -> Away:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._host.take(ROLE, size, "what backward keeps")
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        flat = torch.empty(size, dtype=torch.uint8, pin_memory=source.is_cuda)

        def copy() -> None:
            flat.copy_(source, non_blocking=True)

        self._let_go(BUFFERS - 1)
        if self._count is not None:
            self._count.keep(source)
        self._leaving.append((self._lane.submit(copy, "activations to the host"), source, tensor, tensor._version))
        away = Away(size, flat, self._last)
        weakref.finalize(away, self._host.give, ROLE, size).atexit = False
        self._last = weakref.ref(away)
        self.bytes_out += size
        return away

    def restore(self, saved: Saved, device: torch.device, first: bool) -> Tensor:
        """The tensor on the device again; what was saved before it is on its way. `first`: of a node of the graph, which needs no more what the one
        before it had."""
        self._let_go(0)
        if self._all is None and self._stands_for is None:  # what will stay from the next microbatch on takes its part now
            self._stands_for = torch.empty(round((1 - self._share) * self._so_far), dtype=torch.uint8, device=device)
            if self._count is not None:
                self._count.keep(self._stands_for)
        if first:
            self._in_use.clear()
        away = saved.away
        here = self._here(away) if self._here(away) is not None else self._fetch(away, device)
        assert away.fetched is not None and here is not None
        away.fetched.wait()
        away.ahead = None
        self._in_use.append(here)
        earlier = away.earlier() if away.earlier is not None else None
        if earlier is not None and self._here(earlier) is None:
            earlier.ahead = self._fetch(earlier, device)
        typed = torch.empty(0, dtype=saved.dtype, device=device)
        return typed.set_(here.untyped_storage(), saved.offset, saved.size, saved.stride)

    @staticmethod
    def _here(away: Away) -> Tensor | None:
        return away.here() if away.here is not None else None

    def _fetch(self, away: Away, device: torch.device) -> Tensor:
        here = torch.empty(away.nbytes, dtype=torch.uint8, device=device)
        if self._count is not None:
            self._count.keep(here)
        away.here, flat = weakref.ref(here), away.flat

        def copy() -> None:
            here.copy_(flat, non_blocking=True)
            if here.is_cuda:  # it may be given up before anybody has asked for it
                here.record_stream(torch.cuda.current_stream(here.device))

        away.fetched = self._lane.submit(copy, "activations from the host")
        self.bytes_in += away.nbytes
        return here


def check_unchanged(tensor: Tensor, version: int) -> None:
    """UserError if `tensor`, saved at that `version`, has been changed since; autograd itself looks no more where hooks save."""
    if tensor._version != version:
        raise UserError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after it had been used (version {version}, now "
            f"{tensor._version}): make the operation out of place"
        )

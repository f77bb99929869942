"""Activations offloaded to the host: copied there during the forward, and back during backward.

    forward     save a, save b, save c ...        a goes to the host during the forward; its device memory is free then
    backward    ... uses c, uses b, uses a        while one is used, the one saved before it is on its way

What a pass saves first goes; the rest is needed again soon. A storage goes once, however many tensors of it are saved.
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
from shoal.device import is_accelerator, record_use
from shoal.errors import UserError

BUFFERS = 2
"""Storages on their way to the host at a time, at most."""
WORTH = 1 << 14
"""Bytes: a smaller storage stays, since a copy would cost more than it frees."""


@dataclass(eq=False)
class Away:
    """A storage on the host.

    - `flat`: its bytes there; `here`: its bytes on the device while they are wanted
    - `earlier`: the storage saved before it
    - `ahead`: its bytes on the device, fetched before anybody has asked for them
    """

    nbytes: int
    flat: Tensor
    earlier: weakref.ref[Away] | None
    here: weakref.ref[Tensor] | None = None
    fetched: Ticket | None = None
    ahead: Tensor | None = None


@dataclass(frozen=True)
class Saved:
    """A tensor of a storage that is away."""

    away: Away
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class OnHost:
    """Sends `share` of the bytes that autograd saves of each microbatch to the host, on `lane`.

    The first microbatch goes as a whole, and says how many bytes there are. `host` is the tier there; `count` counts
    what is on the device, where that is a CPU.
    """

    def __init__(self, share: float, lane: Lane, host: Tier, count: Activations | None) -> None:
        self._share, self._lane, self._host, self._count = share, lane, host, count
        self._known: dict[int, tuple[StorageWeakRef, int, weakref.ref[Away] | None]] = {}  # None: it stays
        self._last: weakref.ref[Away] | None = None
        self._all: int | None = None
        self._so_far = 0
        self._is_first = True  # no backward is over yet
        self._stands_for: Tensor | None = None
        self._leaving: deque[tuple[Ticket, Tensor, Tensor, int]] = deque()  # counted on the device until they have gone
        self._in_use: list[Tensor] = []  # of the node of the graph that runs now
        self.bytes_out = self.bytes_in = 0

    def forward_is_over(self) -> None:
        """Ends a microbatch's forward: in a pipeline another one may come before its backward."""
        if self._so_far:
            self._all, self._so_far = max(self._all or 0, self._so_far), 0  # the last batch may be short
        self._known.clear()
        self._last = None

    def begin(self) -> None:
        """Begins another microbatch: a backward is over."""
        self.forward_is_over()
        self._is_first, self._stands_for = self._is_first and self._all is None, None
        self._in_use.clear()

    def _let_go(self, at_most: int) -> None:
        """Frees the device memory of what has arrived, and waits until at most `at_most` are on their way."""
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
        if found is not None and (found[0].expired() or found[1] != tensor._version):
            found = None  # other values, or another storage where it was
        if found is not None and found[2] is None:
            return None
        away = found[2]() if found is not None and found[2] is not None else None
        if away is None:
            self._so_far += size
            known = StorageWeakRef(storage), tensor._version
            if self._all is not None and self._share < 1 and self._so_far > self._share * self._all:
                self._known[storage._cdata] = (*known, None)
                return None
            away = self._send(tensor)
            self._known[storage._cdata] = (*known, weakref.ref(away))
        return Saved(away, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _send(self, tensor: Tensor) -> Away:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._host.take(ROLE, size, "what backward keeps")
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        flat = torch.empty(size, dtype=torch.uint8, pin_memory=is_accelerator(source.device))

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
        """Brings the tensor back to `device`, and starts with the one saved before it.

        `first`: the first that a node of the graph asks for; what the node before it used may go.
        """
        self._let_go(0)
        if self._is_first and self._stands_for is None:  # takes the memory of what stays from the next microbatch on
            left = round((1 - self._share) * (self._all or self._so_far))
            self._stands_for = torch.empty(left, dtype=torch.uint8, device=device)
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
            record_use(here)  # it may be given up before anybody has asked for it

        away.fetched = self._lane.submit(copy, "activations from the host")
        self.bytes_in += away.nbytes
        return here


def check_unchanged(tensor: Tensor, version: int) -> None:
    """Raises UserError if `tensor`, saved at `version`, was changed since; autograd itself does not look where hooks
    save."""
    if tensor._version != version:
        raise UserError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place after it had been used "
            f"(version {version}, now {tensor._version}): make the operation out of place"
        )

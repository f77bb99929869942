"""The protocol of a group's transport: shared memory, sockets, NCCL, or threads of one process that play the ranks.

Every transport has the same blocking operations over contiguous 1-D tensors, so an exchange algorithm is one file for
all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.device import CPU


class Transport(Protocol):
    """Carries collectives of `size` ordered ranks. `op` is "sum", "avg", "min", "max" or "product".

    Every rank calls the same operations in the same order with fitting sizes, one collective at a time (`Group` sees to
    that); messages (`send`, `recv`, `exchange`) may come from other threads meanwhile. Raises RuntimeError if a rank
    dies or is late.
    """

    rank: int
    size: int

    @property
    def carrier(self) -> str:
        """The transport's name for people."""

    def all_reduce(self, flat: Tensor, op: str) -> None:
        """Replaces `flat` by the `op` over all ranks' tensors, the same bits on every rank."""

    def reduce_scatter(self, out: Tensor, flat: Tensor, op: str) -> None:
        """Fills `out` with this rank's cut of the `op` over all `flat` (size * out.numel(), may be overwritten)."""

    def all_gather(self, out: Tensor, flat: Tensor) -> None:
        """Fills `out` (size * flat.numel()) with every rank's `flat` in rank order. `flat` may be a cut of `out`."""

    def all_to_all(self, out: Tensor, flat: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        """Sends split r of `flat` to rank r; fills split r of `out` with what rank r sent. Splits count elements."""

    def broadcast(self, flat: Tensor, src: int) -> None:
        """Copies the `flat` of `src` to all ranks."""

    def scatter(self, out: Tensor, flat: Tensor | None, src: int) -> None:
        """Fills each rank's `out` with its cut of `flat` (size * out.numel(), on `src` only)."""

    def gather(self, out: Tensor | None, flat: Tensor, dst: int) -> None:
        """Fills `out` (size * flat.numel(), on `dst` only) with every rank's `flat` in rank order."""

    def send(self, flat: Tensor, dst: int) -> None:
        """Sends `flat` to `dst`, which calls `recv`; returns when `flat` may be written again."""

    def recv(self, flat: Tensor, src: int) -> None:
        """Fills `flat` with what `src` sends."""

    def exchange(self, out: Tensor, source: int, flat: Tensor, target: int) -> None:
        """Sends `flat` to `target` while filling `out` from `source`, so that rings and pairs do not deadlock."""

    def barrier(self) -> None:
        """Waits until every rank has come."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a zeroed 1-D tensor that reductions and gathers do not copy, or None; all ranks call it alike."""

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns a zeroed 1-D tensor that is the same memory on all ranks, or None; all ranks call it alike."""

    def close(self) -> None:
        """Closes the connections; no operation can follow."""


class Unlike(Exception):
    """Ranks do not have the same number. `numbers`: everybody's, in rank order."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__(f"ranks have different numbers: {numbers}")
        self.numbers = numbers


class Compares(Transport, Protocol):
    """A transport whose gathers may compare numbers: `compares`."""

    @property
    def compares(self) -> bool:
        """Whether they do. Other transports have no such attribute."""

    def all_gather_alike(self, out: Tensor, flat: Tensor, number: int) -> None:
        """Gathers as `all_gather` does. Raises Unlike, on all ranks, where they do not have the same `number` (from 1),
        whatever the sizes; then nothing is gathered, and the group goes on."""


class NoSharedMemory:
    """A mix-in for transports whose ranks share no memory."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return None

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return None


def for_every_device(transport: Transport) -> Mapping[str, Transport]:
    """`transport` by the type of every device, for a Group whose tensors it takes wherever they are."""
    return defaultdict(lambda: transport, {CPU.type: transport})


def sent_bytes(operation: str, payload: int, size: int, rank: int = 0, root: int = 0) -> int:
    """Returns the bytes that `rank` hands to others in one call of a bandwidth-optimal algorithm.

    `payload`: bytes of the tensor that is reduced, gathered into, split, or copied whole: the large side.
    Point-to-point operations and uneven all-to-alls hand over what they are given and are not in this table. The
    formulas are those of rings in Thakur et al. 2005, https://doi.org/10.1177/1094342005051521; a root hands each of
    the others its copy or cut.
    """
    others = size - 1
    match operation:
        case "all_reduce":
            return 2 * others * payload // size
        case "reduce_scatter" | "all_gather" | "all_to_all":
            return others * payload // size
        case "broadcast":
            return others * payload if rank == root else 0
        case "scatter":
            return others * payload // size if rank == root else 0
        case "gather":
            return 0 if rank == root else payload // size
        case "barrier":
            return 0
    raise ValueError(f"{operation} is not in the table of sent bytes")

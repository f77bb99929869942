"""Adasum (https://arxiv.org/abs/2006.02924): averages what replicas agree on and adds what is orthogonal.

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b,   for each parameter, products in fp64; b if |a| = 0

over a binary tree of replicas. Vectors are halved level by level (recursive halving, distance doubling), so that a rank
sends 2 (W-1)/W of them; the products of a level are summed over the ranks that hold the pieces. Ranks beyond the
largest power of two hand their vector to a partner first and get the result from it.

It combines gradients, or deltas as Horovod's optimizer does: each replica takes its own optimizer's step from the
common weights, and weights = start + adasum of the steps. An optimizer that divides by the size of gradients, as Adam
does, would cancel what Adasum has added to combined gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.chunks import Chunk, Slot
from shoal.comm import Group
from shoal.errors import UserError
from shoal.exchange.algorithm import USUAL_CHUNK, Algorithm, Holds, Replica
from shoal.exchange.sends import Sends, to_peers


@dataclass
class Adasum(Algorithm):
    """Combines gradients or steps of the replicas by Adasum.

    - `of`: "gradients" (each replica's mean gradient); "deltas" (a step of each replica's own optimizer: one more copy
      of the weights, optimizer states differ by replica, and each replica clips its own gradient); None chooses
      gradients for SGD, in a loop of others that exchanges gradients, and inside islands, and deltas for every other
      optimizer

    The sum of many is larger than their mean: 2 to 2.5 times the learning rate of one replica is usual.
    """

    of: str | None = None
    of_whole_models = "it weighs replicas by products of whole parameters"
    of_whole_rows = (
        "it combines the gradients of ranks' own losses, and attention mixes those of ranks that share a row"
    )
    chunk_bytes: int | None = USUAL_CHUNK

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        return Sends(handed=to_peers(ranks))

    def __post_init__(self) -> None:
        if self.of not in (None, "gradients", "deltas"):
            raise UserError(f'plan.exchange: of = {self.of!r}: adasum combines "gradients" or "deltas"')

    def suits(self, make: Callable[[], torch.optim.Optimizer]) -> None:
        if self.of is None:
            self.of = "gradients" if isinstance(make(), torch.optim.SGD) else "deltas"

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._start = [torch.empty_like(chunk.master) for chunk in replica.chunks] if self.own_optimizers else []

    @property
    def own_optimizers(self) -> bool:
        return self.of == "deltas"

    @property
    def trains_apart(self) -> bool:
        return False

    def drifts(self, step: int) -> bool:
        """Returns whether the optimizers' states may differ, although the weights are equal."""
        return self.own_optimizers and step > 0

    def holds(self, step: int) -> Holds:
        return Holds.LOCAL_MEAN if self.own_optimizers else Holds.MEAN

    @torch.no_grad()
    def begin(self, step: int) -> None:
        for chunk, start in zip(self.replica.chunks, self._start, strict=False):
            start.copy_(chunk.master)

    def due(self, step: int, untouched: Sequence[str]) -> Sequence[str]:
        """Lets a replica whose samples count nothing take no step: it would be one of momentum and decay alone."""
        chunks = self.replica.chunks
        if self.own_optimizers and not any(bool(chunk.gradient.any()) for chunk in chunks):
            return [slot.name for chunk in chunks for slot in chunk.slots]
        return untouched

    @torch.no_grad()
    def renew(self, to_mean: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        for chunk, start in zip(self.replica.chunks, self._start, strict=False):
            delta = chunk.master - start
            adasum(delta, chunk.slots, self.replica.group, f"deltas {chunk.index}")
            torch.add(start, delta, out=chunk.master)
            chunk.publish()

    @torch.no_grad()
    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        chunk.gradient.mul_(own_mean)
        if self.own_optimizers:
            return
        adasum(chunk.gradient, chunk.slots, self.replica.group, f"gradients {chunk.index}")


def adasum(flat: Tensor, slots: tuple[Slot, ...], group: Group, purpose: str) -> None:
    """Replaces `flat`, laid out in `slots`, by the Adasum over `group`, the same bits on every rank."""
    rank, size = group.rank, group.size
    paired = 1 << (size.bit_length() - 1)
    if rank >= paired:
        group.send(flat, rank - paired, purpose=purpose)
        group.recv(flat, rank - paired, purpose=purpose)
        return
    if rank + paired < size:
        other = torch.empty_like(flat)
        group.recv(other, rank + paired, purpose=purpose)
        _combine(flat, flat, other, _products(flat, other, slots, 0), slots, 0)
    mine = _halve(flat, slots, group, paired, purpose)
    _gather(flat, mine, group, paired, purpose)
    if rank + paired < size:
        group.send(flat, rank + paired, purpose=purpose)


def _halve(
    flat: Tensor, slots: tuple[Slot, ...], group: Group, paired: int, purpose: str
) -> list[tuple[int, int, int]]:
    """Combines half of this rank's range with the partner's, level by level; returns (start, middle, stop) of each."""
    start, stop, distance, levels = 0, flat.numel(), 1, []
    while distance < paired:
        partner, middle = group.rank ^ distance, (start + stop) // 2
        levels.append((start, middle, stop))
        low = not group.rank & distance
        halves = slice(start, middle), slice(middle, stop)
        kept, given = halves if low else halves[::-1]
        other = torch.empty_like(flat[kept])
        group.exchange(other, partner, flat[given], partner, purpose=purpose)
        a, b = (flat[kept], other) if low else (other, flat[kept])
        products = _products(a, b, slots, kept.start)
        step = 1
        while step <= distance:  # the products of all pieces, summed over the block of ranks that hold them
            theirs = torch.empty_like(products)
            group.exchange(theirs, group.rank ^ step, products, group.rank ^ step, purpose=purpose)
            products = products + theirs
            step *= 2
        _combine(flat[kept], a, b, products, slots, kept.start)
        start, stop = kept.start, kept.stop
        distance *= 2
    return levels


def _gather(flat: Tensor, levels: list[tuple[int, int, int]], group: Group, paired: int, purpose: str) -> None:
    """Undoes the halving: partners give each other the half that they combined."""
    distance = paired // 2
    for start, middle, stop in reversed(levels):
        low = not group.rank & distance
        halves = slice(start, middle), slice(middle, stop)
        mine, theirs = halves if low else halves[::-1]
        group.exchange(flat[theirs], group.rank ^ distance, flat[mine], group.rank ^ distance, purpose=purpose)
        distance //= 2


def _products(a: Tensor, b: Tensor, slots: tuple[Slot, ...], start: int) -> Tensor:
    """Returns a.b, a.a and b.b (fp64 [slots, 3]) of each slot's part of the range that begins at `start`."""
    rows = []
    for part in _parts(slots, start, start + a.numel()):
        x, y = a[part].double(), b[part].double()
        rows.append(torch.stack([x @ y, x @ x, y @ y]))
    return torch.stack(rows)


def _combine(out: Tensor, a: Tensor, b: Tensor, products: Tensor, slots: tuple[Slot, ...], start: int) -> None:
    tiny = torch.finfo(torch.float64).tiny ** 0.5
    for part, (ab, aa, bb) in zip(_parts(slots, start, start + a.numel()), products.tolist(), strict=True):
        of_a = 1 - ab / (2 * aa) if aa >= tiny else 1.0
        of_b = 1 - ab / (2 * bb) if bb >= tiny else 1.0
        out[part] = a[part] * of_a + b[part] * of_b


def _parts(slots: tuple[Slot, ...], start: int, stop: int) -> list[slice]:
    """Returns each slot's part of [start, stop), relative to `start`; empty where it lies outside."""
    return [
        slice(min(max(slot.offset, start), stop) - start, max(min(slot.offset + slot.numel, stop), start) - start)
        for slot in slots
    ]

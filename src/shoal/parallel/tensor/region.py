"""Where the ranks along tp compute parts of the same: the way in and the way out (Megatron-LM's f and g, arXiv 1909.08053).

    same on all ranks  --enter-->  each rank its heads, its columns  --leave-->  same on all ranks

What enters has its gradients summed; what leaves is summed. Inside, the ranks that share a head hand each other its rows (`share`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor

from shoal.comm import Group
from shoal.comm.functional import copy_to, gather_alike, gather_from, reduce_from


class Region:
    """The ranks of `group`; `among(ranks)` makes a group of some of them, by their numbers in the world."""

    def __init__(self, group: Group, among: Callable[[list[int]], Group]) -> None:
        self.group, self._among = group, among
        self.size, self.rank = group.size, group.rank
        self._last: tuple[ref[Tensor], ref[Tensor], bool] | None = None
        self._heads = 0

    @torch.compiler.disable
    def enter(self, x: Tensor) -> Tensor:
        """`x`, which all ranks have alike, for a use that differs. What enters several times in a row (queries, keys and values of the same) enters once, so that
        its gradients are summed once."""
        if self._last is not None:
            outside, inside, recorded = self._last
            if outside() is x and (entered := inside()) is not None and recorded == torch.is_grad_enabled():
                return entered
        entered = copy_to(x, self.group)
        self._last = ref(x), ref(entered), torch.is_grad_enabled()
        return entered

    @torch.compiler.disable
    def enter_alone(self, x: Tensor) -> Tensor:
        """The same for one use of `x`, such as a weight."""
        return copy_to(x, self.group)

    @torch.compiler.disable
    def leave(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts."""
        return reduce_from(part, self.group)

    @torch.compiler.disable
    def share(self, part: Tensor, sharers: int) -> Tensor:
        """The last dims of `part` of the neighbouring ranks that share a head, one after the other; their gradients are summed."""
        return gather_from(part, self._neighbours(sharers), -1)

    @torch.compiler.disable
    def whole(self, part: Tensor, lengths: Sequence[int]) -> Tensor:
        """The last dims of all ranks' parts, of `lengths`, one after the other, where all ranks then do the same with it."""
        return gather_alike(part, self.group, -1, lengths)

    @contextmanager
    def attention(self, heads: int) -> Iterator[None]:
        """Inside, tensors [B, heads, ..] are of this rank's heads: `heads` of them, as many on every rank."""
        before, self._heads = self._heads, heads
        try:
            yield
        finally:
            self._heads = before

    def part(self, x: Tensor, elements: int) -> int:
        """From which element of a whole sample on are the `elements` that `x` has of each: what keyed randomness asks."""
        return self.rank * elements if self._heads and x.dim() == 4 and x.shape[1] == self._heads else 0

    def _neighbours(self, sharers: int) -> Group:
        first = self.rank - self.rank % sharers
        return self._among(self.group.ranks[first : first + sharers])

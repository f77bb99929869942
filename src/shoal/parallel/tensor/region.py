"""Where the ranks along tp compute parts of the same: the way in and the way out (Megatron-LM's f and g, arXiv 1909.08053).

    same on all ranks  --enter-->  each rank its heads, its columns  --leave-->  same on all ranks

What enters has its gradients summed; what leaves is summed. Inside, the ranks that share a head hand each other its rows (`share`).

With `sequence` (sequence parallel, arXiv 2205.05198) each rank has its tokens between the regions: what all compute alike otherwise (norms, dropout,
residual sums) is computed once. The sum and the distribution together send as much: all-gather and reduce-scatter in place of all-reduce.

    its tokens  --enter-->  all tokens, its heads, its columns  --leave-->  its tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm import Group
from shoal.comm.functional import copy_to, gather_alike, gather_from, reduce_from, scatter_sum
from shoal.errors import UserError
from shoal.parallel.tensor.overlap import TokenRing
from shoal.parallel.tensor.spans import length

PURPOSE = "activations"
HOW = 'tensor_rules={"": "whole"} gives each rank all tokens between its layers'


class Region:
    """The ranks of `group`; `among(ranks)` makes a group of some of them, by their numbers in the world. `ring`: where tokens go round while they are multiplied, if
    `overlaps` says so."""

    def __init__(self, group: Group, among: Callable[[list[int]], Group], ring: TokenRing | None = None) -> None:
        self.group, self._among, self._ring = group, among, ring
        self.size, self.rank = group.size, group.rank
        self.sequence = self.overlaps = False
        self._tokens: tuple[int, ...] = ()  # of each rank, in the forward that runs
        self._last: tuple[ref[Tensor], ref[Tensor], tuple[bool, int | None]] | None = None
        self._heads = 0
        self.rows = 0  # of the batch in the forward that runs

    def state(self) -> Any:
        """What the forward that runs has said of itself so far: how many rows and tokens there are."""
        return self._tokens, self.rows

    def recall(self, state: Any) -> None:
        """Goes on with a forward that has said so."""
        self._tokens, self.rows = state

    @torch.compiler.disable
    def enter(self, x: Tensor) -> Tensor:
        """`x` [B, T, ..], which all ranks have alike, or each its tokens of, for a use that differs. What enters several times in a row (queries, keys and values
        of the same) enters once, so that its gradients are summed once."""
        if (known := self._entered(x)) is not None:
            return known
        if self.sequence:
            self._check(x)
            entered = gather_from(x, self.group, 1, self._tokens, PURPOSE)
        else:
            entered = copy_to(x, self.group, PURPOSE)
        self._last = ref(x), ref(entered), self._state(x)
        return entered

    @torch.compiler.disable
    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What enters, times the transpose of [Y, X], as it comes (`overlaps`); at once where it has come."""
        if not self._goes_round or self._entered(x) is not None:
            return F.linear(self.enter(x), weight, bias)
        assert self._ring is not None
        self._check(x)
        y, entered = self._ring.gathered(x, weight, bias, self._tokens)
        self._last = ref(x), ref(entered), self._state(x)
        return y

    @torch.compiler.disable
    def multiply_and_leave(self, x: Tensor, weight: Tensor) -> Tensor:
        """This rank's tokens of the sum over all ranks of `x` times the transpose of [Y, X], as they are ready (`overlaps`)."""
        if not self._goes_round:
            return self.leave(F.linear(x, weight))
        assert self._ring is not None
        return self._ring.scattered(x, weight, self._tokens)

    @property
    def _goes_round(self) -> bool:
        """Transforms of torch.func take the collectives, which they pass through again and again."""
        return self.overlaps and torch._C._functorch.peek_interpreter_stack() is None

    def _entered(self, x: Tensor) -> Tensor | None:
        """What came of `x` when it entered, if it was the last one to do so."""
        if self._last is None:
            return None
        outside, inside, before = self._last
        return inside() if outside() is x and before == self._state(x) else None

    @staticmethod
    def _state(x: Tensor) -> tuple[bool, int | None]:
        return torch.is_grad_enabled(), None if x.is_inference() else x._version

    @torch.compiler.disable
    def enter_alone(self, weight: Tensor) -> Tensor:
        """A weight that all ranks have, for a use that differs: its gradients are summed, here or with those of all such weights (`sequence`)."""
        return weight if self.sequence else copy_to(weight, self.group, PURPOSE)

    @torch.compiler.disable
    def leave(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, or this rank's tokens of it."""
        if not self.sequence:
            return reduce_from(part, self.group, PURPOSE)
        if part.shape[1] != sum(self._tokens):
            raise UserError(f"{tuple(part.shape)} is summed for {sum(self._tokens)} tokens: {HOW}")
        return scatter_sum(part, self.group, 1, self._tokens, PURPOSE)

    @torch.compiler.disable
    def leave_first(self, part: Tensor) -> Tensor:
        """The same of an embedding [B, T, D], with which a forward begins: its T tokens are dealt to the ranks."""
        self.rows = part.shape[0]
        if self.sequence:
            self._tokens = tuple(length(part.shape[1], self.size, rank) for rank in range(self.size))
        return self.leave(part)

    @torch.compiler.disable
    def own_tokens(self, x: Tensor) -> Tensor:
        """Of `x` [.., T, D], which all ranks have alike, this rank's tokens, where ranks have their own."""
        if not self.sequence:
            return x
        if x.shape[-2] != sum(self._tokens):
            raise UserError(f"{tuple(x.shape)} is cut by {sum(self._tokens)} tokens: {HOW}")
        return x.narrow(-2, sum(self._tokens[: self.rank]), self._tokens[self.rank])

    def _check(self, x: Tensor) -> None:
        if x.dim() < 3 or x.shape[1] != self._tokens[self.rank]:
            raise UserError(f"{tuple(x.shape)} comes where this rank has {self._tokens[self.rank]} of the tokens: {HOW}")

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

    def has_heads(self, heads: int, among: int = 1) -> bool:
        """Whether weights of attention of so many heads are of this rank's, which it shares with `among` ranks along another axis."""
        return self._heads > 0 and heads * among == self._heads

    def tokens_of(self, rank: int) -> tuple[int, int]:
        """How many tokens of the forward that runs stand before those of `rank`, and how many it has (`sequence`)."""
        return (sum(self._tokens[:rank]), self._tokens[rank]) if self._tokens else (0, 0)

    @torch.compiler.disable
    def enter_rows(self, x: Tensor) -> Tensor:
        """As `enter`, of `x` [N, ..], whose N are all tokens here, one row after the other."""
        if self.sequence:
            return gather_from(x, self.group, 0, self._lengths, PURPOSE)
        return self.enter(x) if x.is_floating_point() else x

    @torch.compiler.disable
    def leave_rows(self, part: Tensor) -> Tensor:
        """As `leave`, of [N, ..]."""
        return scatter_sum(part, self.group, 0, self._lengths, PURPOSE) if self.sequence else self.leave(part)

    @property
    def _lengths(self) -> list[int]:
        return [self.rows * tokens for tokens in self._tokens]

    def _neighbours(self, sharers: int) -> Group:
        first = self.rank - self.rank % sharers
        return self._among(self.group.ranks[first : first + sharers])

"""The region in which the ranks along tp each compute a part of the same result: the way in and the way out
(Megatron-LM's f and g, arXiv 1909.08053).

    same on all ranks  --enter-->  each rank its heads, its columns  --leave-->  same on all ranks

The gradients of what enters are summed over the ranks; what leaves is summed. Inside, the ranks that share a head
gather its rows (`share`).

With `sequence` (sequence parallel, arXiv 2205.05198) each rank has its own tokens between the regions, so that norms,
dropout and residual sums are computed once, not by every rank. All-gather and reduce-scatter replace the all-reduce and
send as many bytes.

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
from shoal.parallel.tensor.piece import Piece
from shoal.parallel.tensor.spans import length

PURPOSE = "activations"
HOW = 'tensor_rules={"": "whole"} gives each rank all tokens between its layers'


class Region:
    """The collectives at the borders of the tensor-parallel region.

    group: the ranks along tp
    among: makes a group of some of them, given their ranks in the world
    ring: sends tokens round while they are multiplied, used if `overlaps` is set
    """

    def __init__(self, group: Group, among: Callable[[list[int]], Group], ring: TokenRing | None = None) -> None:
        self.group, self._among, self._ring = group, among, ring
        self.size, self.rank = group.size, group.rank
        self.sequence = self.overlaps = False
        self._tokens: tuple[int, ...] = ()  # of each rank, in the running forward
        self._last: tuple[ref[Tensor], list[Tensor], tuple[bool, int | None]] | None = None
        self._heads = 0
        self._draws: Iterator[Piece | None] = iter(())
        self.rows = 0  # of the batch in the running forward

    def state(self) -> Any:
        """Returns what the running forward has noted so far: the tokens of each rank and the number of rows."""
        return self._tokens, self.rows

    def recall(self, state: Any) -> None:
        """Continues with a forward whose `state` is given."""
        self._tokens, self.rows = state

    @torch.compiler.disable
    def enter(self, x: Tensor) -> Tensor:
        """Returns the region's input for `x` [B, T, ..]: `x` itself, or the tokens of all ranks gathered (`sequence`).

        The gradients are summed over the ranks. A tensor that enters several times in a row (for queries, keys and
        values) is entered once, so that its gradients are summed once. What is returned must not be changed in place.
        """
        if (known := self._entered(x)) is not None:
            return known
        if self.sequence:
            self._check(x)
            entered = gather_from(x, self.group, 1, self._tokens, PURPOSE)
        else:
            entered = copy_to(x, self.group, PURPOSE)
        self._note(x, entered)
        return entered

    @torch.compiler.disable
    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of the entered `x` with the transpose of `weight` [Y, X], plus `bias`.

        With `overlaps` the tokens are multiplied as they arrive, unless `x` has entered already.
        """
        if not self._goes_round or self._entered(x) is not None:
            return F.linear(self.enter(x), weight, bias)
        assert self._ring is not None
        self._check(x)
        y, entered = self._ring.gathered(x, weight, bias, self._tokens)
        self._note(x, entered)
        return y

    @torch.compiler.disable
    def multiply_and_leave(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns this rank's tokens of the sum over all ranks of `x` times the transpose of `weight` [Y, X].

        With `overlaps` the sums travel while the next product is computed.
        """
        if not self._goes_round:
            return self.leave(F.linear(x, weight))
        assert self._ring is not None
        return self._ring.scattered(x, weight, self._tokens)

    @property
    def _goes_round(self) -> bool:
        """True if products overlap with communication. Transforms of torch.func use the collectives, which they can
        differentiate repeatedly."""
        return self.overlaps and torch._C._functorch.peek_interpreter_stack() is None

    def _note(self, x: Tensor, entered: Tensor) -> None:
        """Keeps what `x` became when it entered as long as `x` lives, until another tensor enters."""
        held = [entered]
        self._last = ref(x, lambda _: held.clear()), held, self._state(x)

    def _entered(self, x: Tensor) -> Tensor | None:
        """Returns what `x` became when it entered, if it was the last tensor to do so."""
        if self._last is None:
            return None
        outside, held, before = self._last
        return held[0] if outside() is x and before == self._state(x) else None

    @staticmethod
    def _state(x: Tensor) -> tuple[bool, int | None]:
        return torch.is_grad_enabled(), None if x.is_inference() else x._version

    @torch.compiler.disable
    def enter_alone(self, weight: Tensor) -> Tensor:
        """Returns a weight that all ranks have and use differently, so that its gradients are summed.

        They are summed here, or later with those of all such weights (`sequence`).
        """
        return weight if self.sequence else copy_to(weight, self.group, PURPOSE)

    @torch.compiler.disable
    def leave(self, part: Tensor) -> Tensor:
        """Returns the sum of all ranks' parts, or this rank's tokens of it (`sequence`)."""
        if not self.sequence:
            return reduce_from(part, self.group, PURPOSE)
        if part.shape[1] != sum(self._tokens):
            raise UserError(f"{tuple(part.shape)} is summed for {sum(self._tokens)} tokens: {HOW}")
        return scatter_sum(part, self.group, 1, self._tokens, PURPOSE)

    @torch.compiler.disable
    def leave_first(self, part: Tensor) -> Tensor:
        """Leaves with the output [B, T, D] of an embedding, which begins a forward; notes B and deals the T tokens
        out."""
        self.rows = part.shape[0]
        if self.sequence:
            self._tokens = tuple(length(part.shape[1], self.size, rank) for rank in range(self.size))
        return self.leave(part)

    @torch.compiler.disable
    def own_tokens(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of `x` [.., T, D], which is the same on all ranks; `x` itself without
        `sequence`."""
        if not self.sequence:
            return x
        if x.shape[-2] != sum(self._tokens):
            raise UserError(f"{tuple(x.shape)} is cut by {sum(self._tokens)} tokens: {HOW}")
        return x.narrow(-2, sum(self._tokens[: self.rank]), self._tokens[self.rank])

    def _check(self, x: Tensor) -> None:
        if x.dim() < 3 or x.shape[1] != self._tokens[self.rank]:
            raise UserError(
                f"{tuple(x.shape)} comes where this rank has {self._tokens[self.rank]} of the tokens: {HOW}"
            )

    @torch.compiler.disable
    def share(self, part: Tensor, sharers: int) -> Tensor:
        """Gathers the last dim of `part` from the neighbouring ranks that share a head; gradients are summed."""
        return gather_from(part, self._neighbours(sharers), -1)

    @torch.compiler.disable
    def whole(self, part: Tensor, lengths: Sequence[int]) -> Tensor:
        """Gathers the last dim, of `lengths` by rank, from all ranks, which all do the same with the result."""
        return gather_alike(part, self.group, -1, lengths)

    @contextmanager
    def attention(self, heads: int) -> Iterator[None]:
        """Notes that tensors [B, heads, ..] inside the context are of this rank's `heads`, as many on every rank."""
        before, self._heads = self._heads, heads
        try:
            yield
        finally:
            self._heads = before

    @contextmanager
    def drawing(self, order: Sequence[Piece | None]) -> Iterator[None]:
        """Notes which part of a tensor each draw inside the context is of, in order; None: all ranks have the tensor
        whole."""
        before, self._draws = self._draws, iter(order)
        try:
            yield
        finally:
            self._draws = before

    def next_draw(self) -> Piece | None:
        """Returns the part of which the next draw is, as `drawing` says."""
        return next(self._draws, None)

    def has_heads(self, heads: int, among: int = 1) -> bool:
        """True if attention weights of `heads` heads are of this rank's heads, dealt out to `among` ranks along another
        axis."""
        return self._heads > 0 and heads * among == self._heads

    def tokens_of(self, rank: int) -> tuple[int, int]:
        """Returns (tokens before those of `rank`, tokens of `rank`) in a row of the running forward (`sequence`)."""
        return (sum(self._tokens[:rank]), self._tokens[rank]) if self._tokens else (0, 0)

    @torch.compiler.disable
    def enter_rows(self, x: Tensor) -> Tensor:
        """Enters with `x` [N, ..], whose N rows are all tokens of this rank, one row of the batch after the other."""
        if self.sequence:
            return gather_from(x, self.group, 0, self._lengths, PURPOSE)
        return self.enter(x) if x.is_floating_point() else x

    @torch.compiler.disable
    def leave_rows(self, part: Tensor) -> Tensor:
        """Leaves with `part` [N, ..], the counterpart of `enter_rows`."""
        return scatter_sum(part, self.group, 0, self._lengths, PURPOSE) if self.sequence else self.leave(part)

    @property
    def _lengths(self) -> list[int]:
        return [self.rows * tokens for tokens in self._tokens]

    def _neighbours(self, sharers: int) -> Group:
        first = self.rank - self.rank % sharers
        return self._among(self.group.ranks[first : first + sharers])

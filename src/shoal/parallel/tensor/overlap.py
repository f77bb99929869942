"""Overlaps products with the communication of tokens: an all-gather with a column layer, a reduce-scatter with a row
layer, each split by rank and sent round a ring.

    gathered    y = [x_0 .. x_n] W^T      the tokens of the next rank arrive while the present ones are multiplied
    scattered   y_r = sum over ranks of the tokens of r, x W^T      a sum travels while the next product is computed

Each is the other's backward (Wang et al., ASPLOS'23, "Overlap communication with dependent computation via
decomposition"). They send as many bytes as the collectives. A rank waits only for what has not arrived when a product
ends, so this pays where a transfer takes about as long as the product; ranks of one host share cores and gain nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.comm import Group, Lane
from shoal.device import record_use

PURPOSE = "activations"


class TokenRing:
    """The ring of the ranks of `group`; tokens are sent on `lane`."""

    def __init__(self, group: Group, lane: Lane) -> None:
        self._group, self._lane = group, lane

    def gathered(self, x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the product [B, T, Y] of all ranks' tokens with the weight, and these tokens [B, T, X];
        differentiable.

        x: this rank's tokens [B, t, X]
        weight, bias: [Y, X] and [Y]
        lengths: the number of tokens t of each rank
        """
        return _Gathered.apply(x, weight, bias, tuple(lengths), self)

    def scattered(self, x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns this rank's tokens [B, t, Y] of the sum over all ranks of their products; differentiable.

        x: all tokens [B, T, X], this rank's columns
        weight: [Y, X]
        lengths: the number of tokens t of each rank
        """
        return _Scattered.apply(x, weight, tuple(lengths), self)

    def gather(self, x: Tensor, lengths: Sequence[int], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes `gathered` without a derivative."""
        size, rank = self._group.size, self._group.rank
        here, parts, products = x.contiguous(), [x] * size, [x] * size
        for step in range(size):
            owner = (rank - step) % size
            if step < size - 1:
                coming = x.new_empty(x.shape[0], lengths[(owner - 1) % size], x.shape[2])
                self._pass_on(coming, here)
            parts[owner], products[owner] = here, F.linear(here, weight, bias)
            if step < size - 1:
                self._lane.wait()
                here = coming
        return torch.cat(products, 1), torch.cat(parts, 1)

    def scatter(self, x: Tensor, lengths: Sequence[int], weight: Tensor, more: Tensor | None = None) -> Tensor:
        """Computes `scattered` without a derivative; `more` [B, T, Y] is added to the products."""
        size, rank = self._group.size, self._group.rank
        xs, extra = x.split(lengths, 1), None if more is None else more.split(lengths, 1)
        arriving: Tensor | None = None
        for step in range(size):
            owner = (rank - 1 - step) % size
            summand = F.linear(xs[owner], weight)
            if extra is not None:
                summand += extra[owner]
            if arriving is not None:
                self._lane.wait()
                summand += arriving
            if step < size - 1:
                arriving = summand.new_empty(x.shape[0], lengths[(owner - 1) % size], summand.shape[2])
                self._pass_on(arriving, summand)
        return summand

    def _pass_on(self, out: Tensor, sent: Tensor) -> None:
        size, rank = self._group.size, self._group.rank

        def work() -> None:
            record_use(out, sent)
            self._group.exchange(out, (rank - 1) % size, sent, (rank + 1) % size, PURPOSE)

        self._lane.submit(work, "tokens")


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...], ring: TokenRing
    ) -> tuple[Tensor, Tensor]:
        y, whole = ring.gather(x, lengths, weight, bias)
        ctx.save_for_backward(whole, weight)
        ctx.lengths, ctx.ring, ctx.has_bias = lengths, ring, bias is not None
        return y, whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, others = grads
        whole, weight = ctx.saved_tensors
        ours = ctx.ring.scatter(grad, ctx.lengths, weight.t(), others) if ctx.needs_input_grad[0] else None
        flat = grad.flatten(0, 1)
        of_weight = flat.t() @ whole.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return ours, of_weight, flat.sum(0) if ctx.has_bias else None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, lengths: tuple[int, ...], ring: TokenRing) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.lengths, ctx.ring = lengths, ring
        return ring.scatter(x, lengths, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        ours, whole = ctx.ring.gather(grads[0], ctx.lengths, weight.t(), None)
        of_weight = whole.flatten(0, 1).t() @ x.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return ours, of_weight, None, None

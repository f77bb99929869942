"""Sends tokens to the ranks that have their experts and the results back: two all-to-alls, forward and backward.

    rank 0, experts 0 1     a->0 b->2 c->1          rank 0 computes  a->0 c->1 | d->1    of ranks 0 | 1
    rank 1, experts 2 3     d->1 e->3 f->2    -->   rank 1 computes  b->2 | e->3 f->2
                                              -->   back in place, weighted and summed where the token is

Only chosen pairs are sent, without padding; each rank first announces how many go to each expert. Tokens are sent while
`meanwhile` computes (shared experts, for instance), and so are their gradients. Pairs dropped for want of capacity are
not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from shoal.comm import Group, Lane
from shoal.comm.functional import deal_into, deal_out
from shoal.comm.lane import Ticket
from shoal.device import record_use, to_device
from shoal.models.experts import Pairs

PURPOSE = "experts"


class Dispatch:
    """Dispatches tokens among the ranks of `group`, which have `experts` between them, in order, equally many each.

    `lane`: on it tokens are sent while something else is computed.
    """

    def __init__(self, group: Group, experts: int, lane: Lane) -> None:
        self.group, self._lane, self._experts = group, lane, experts
        self.each = experts // group.size

    def __call__(
        self,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
        x_ND: Tensor,
        index_NK: Tensor,
        weights_NK: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Returns the output [N, D] of the experts for the tokens of this rank, weighted and summed.

        compute: (rows [M, D], experts [M, 1], ones [M, 1]) -> [M, D], this rank's experts, numbered from 0
        x_ND: tokens
        index_NK: the experts of each token
        weights_NK: their weights
        meanwhile: is called while the tokens are sent
        """
        pairs = Pairs(index_NK, self._experts)
        arriving = self._announced(pairs.counts, x_ND)
        give = [sum(pairs.counts[rank * self.each :][: self.each]) for rank in range(self.group.size)]
        take = [sum(arriving[rank * self.each :][: self.each]) for rank in range(self.group.size)]
        rows = self._travel(x_ND[pairs.tokens], give, take, meanwhile)
        experts = self._numbers(arriving, rows)
        done = compute(rows, experts.unsqueeze(1), weights_NK.new_ones(len(rows), 1))
        return pairs.combine(deal_out(done, self.group, take, give, PURPOSE), weights_NK)

    def _announced(self, counts: Sequence[int], like: Tensor) -> list[int]:
        """Returns how many rows come from each rank for each expert of this one, rank by rank."""
        even = [self.each] * self.group.size
        told = deal_out(to_device(torch.tensor(counts), like.device), self.group, even, even, PURPOSE)
        return list(counts) if isinstance(like, FakeTensor) else told.tolist()  # in a dry run as many as are sent

    def _numbers(self, arriving: Sequence[int], rows: Tensor) -> Tensor:
        """Returns the number [M] of the local expert for each row that has arrived."""
        if isinstance(rows, FakeTensor):
            return rows.new_zeros(len(rows), dtype=torch.int64)
        number = torch.arange(self.each, device=rows.device).repeat(self.group.size)
        return number.repeat_interleave(to_device(torch.tensor(arriving), rows.device), output_size=len(rows))

    def _travel(
        self, rows: Tensor, give: Sequence[int], take: Sequence[int], meanwhile: Callable[[], None] | None
    ) -> Tensor:
        if meanwhile is None:
            return deal_out(rows, self.group, give, take, PURPOSE)
        if isinstance(rows, FakeTensor) or torch._C._functorch.peek_interpreter_stack() is not None:
            meanwhile()
            return deal_out(rows, self.group, give, take, PURPOSE)
        journey = _Journey(self.group, self._lane, give, take)
        leaving: Tensor = _Leave.apply(rows, journey)
        meanwhile()
        return _Arrive.apply(leaving, journey)


class _Journey:
    """Rows in transit, `give[r]` of them to rank r and `take[r]` from it, or their gradients on the way back."""

    def __init__(self, group: Group, lane: Lane, give: Sequence[int], take: Sequence[int]) -> None:
        self._group, self._lane, self._give, self._take = group, lane, list(give), list(take)
        self._ticket: Ticket | None = None
        self.arriving: Tensor | None = None

    def start(self, rows: Tensor, back: bool = False) -> Tensor:
        """Starts sending `rows`; returns the tensor that the arriving ones will fill."""
        give, take = (self._take, self._give) if back else (self._give, self._take)
        rows = rows.contiguous()
        out = rows.new_empty(sum(take), *rows.shape[1:])

        def travel() -> None:
            record_use(rows, out)
            deal_into(out, rows, self._group, give, take, PURPOSE)

        self._ticket, self.arriving = self._lane.submit(travel, "tokens to experts"), out
        return out

    def wait(self) -> Tensor:
        """Waits for the transfer; returns what has arrived."""
        assert self._ticket is not None and self.arriving is not None
        self._ticket.wait("experts")
        arrived, self.arriving = self.arriving, None
        return arrived


class _Leave(torch.autograd.Function):
    """Starts the transfer of tokens; its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.start(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.journey.wait(), None  # _Arrive.backward has sent them


class _Arrive(torch.autograd.Function):
    """Waits for the tokens; its backward starts the transfer of their gradients."""

    @staticmethod
    def forward(ctx: Any, leaving: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.wait()
        return leaving.view_as(leaving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.journey.start(grads[0], back=True)
        return grads[0], None


class Dispatched(nn.Module):
    """Experts of which this rank has some: a module with stacked matrices becomes one by its class."""

    _dispatch: Dispatch

    @torch.compiler.disable
    def forward(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, *meanwhile: Any) -> Tensor:
        return self._dispatch(self._compute, x_ND, index_NK, weights_NK, *meanwhile)

    def _compute(self, rows: Tensor, experts: Tensor, ones: Tensor) -> Tensor:
        if len(rows):
            return super().forward(rows, experts, ones)
        # No token came: a row of zeros, dropped again, so that the weights are used and gradients arrive in the same
        # order as on other ranks.
        filled = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return super().forward(filled, experts.new_zeros(1, 1), ones.new_ones(1, 1))[:0]

"""Tokens travel to the ranks that have their experts, and what the experts make of them comes back: two all-to-alls, forward and backward.

    rank 0, experts 0 1     a->0 b->2 c->1         rank 0 computes  a->0 c->1 | d->1        of ranks 0 | 1
    rank 1, experts 2 3     d->1 e->3 f->2   -->   rank 1 computes  b->2 | e->3 f->2   -->  back in place, weighed and summed where the token is

Only pairs that count are sent (none is padded), each rank says first how many go to which expert. Tokens leave while `meanwhile` computes, what shared experts do for
instance; so do their gradients. What was dropped for want of capacity never leaves.
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
from shoal.device import record_use
from shoal.models.experts import Pairs

PURPOSE = "experts"


class Dispatch:
    """The ranks of `group` have `experts` between them, in order, as many each. `lane`: on which tokens travel while something else is computed."""

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
        """[N, D], where `compute(rows [M, D], experts [M, 1], ones [M, 1])` is what this rank's experts do, whose numbers begin at 0."""
        pairs = Pairs(index_NK, self._experts)
        arriving = self._announced(pairs.counts, x_ND)
        give = [sum(pairs.counts[rank * self.each :][: self.each]) for rank in range(self.group.size)]
        take = [sum(arriving[rank * self.each :][: self.each]) for rank in range(self.group.size)]
        rows = self._travel(x_ND[pairs.tokens], give, take, meanwhile)
        experts = self._numbers(arriving, rows)
        done = compute(rows, experts.unsqueeze(1), weights_NK.new_ones(len(rows), 1))
        return pairs.combine(deal_out(done, self.group, take, give, PURPOSE), weights_NK)

    def _announced(self, counts: Sequence[int], like: Tensor) -> list[int]:
        """How many rows come from each rank for each expert here, one rank's after the other's."""
        if isinstance(like, FakeTensor):  # of a dry run: from all as many as go to all
            return list(counts)
        even = [self.each] * self.group.size
        return deal_out(torch.tensor(counts, device=like.device), self.group, even, even, PURPOSE).tolist()

    def _numbers(self, arriving: Sequence[int], rows: Tensor) -> Tensor:
        """[M]: of each row that has arrived the number of its expert here."""
        if isinstance(rows, FakeTensor):
            return rows.new_zeros(len(rows), dtype=torch.int64)
        number = torch.arange(self.each, device=rows.device).repeat(self.group.size)
        return number.repeat_interleave(torch.tensor(arriving, device=rows.device), output_size=len(rows))

    def _travel(self, rows: Tensor, give: Sequence[int], take: Sequence[int], meanwhile: Callable[[], None] | None) -> Tensor:
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
    """Rows on their way, `give[r]` of them to rank r and `take[r]` from it, or their gradients on the way back."""

    def __init__(self, group: Group, lane: Lane, give: Sequence[int], take: Sequence[int]) -> None:
        self._group, self._lane, self._give, self._take = group, lane, list(give), list(take)
        self._ticket: Ticket | None = None
        self.arriving: Tensor | None = None

    def start(self, rows: Tensor, back: bool = False) -> Tensor:
        """Returns what they will fill."""
        give, take = (self._take, self._give) if back else (self._give, self._take)
        rows = rows.contiguous()
        out = rows.new_empty(sum(take), *rows.shape[1:])

        def travel() -> None:
            record_use(rows, out)
            deal_into(out, rows, self._group, give, take, PURPOSE)

        self._ticket, self.arriving = self._lane.submit(travel, "tokens to experts"), out
        return out

    def wait(self) -> Tensor:
        """What has arrived."""
        assert self._ticket is not None and self.arriving is not None
        self._ticket.wait("experts")
        arrived, self.arriving = self.arriving, None
        return arrived


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.start(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.journey.wait(), None  # they left when the gradient of what had arrived came


class _Arrive(torch.autograd.Function):
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
    """Experts of which this rank has some: what a module with stacked matrices becomes by its class."""

    _dispatch: Dispatch

    @torch.compiler.disable
    def forward(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, *meanwhile: Any) -> Tensor:
        return self._dispatch(self._compute, x_ND, index_NK, weights_NK, *meanwhile)

    def _compute(self, rows: Tensor, experts: Tensor, ones: Tensor) -> Tensor:
        if len(rows):
            return super().forward(rows, experts, ones)
        # no token came: one of zeros, which counts nothing, so that weights are used and gradients pass by in the same order as elsewhere
        filled = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return super().forward(filled, experts.new_zeros(1, 1), ones.new_ones(1, 1))[:0]

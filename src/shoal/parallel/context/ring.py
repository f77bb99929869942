"""Attention over whole rows of which each rank has some tokens: keys and values are sent round the ranks, and results
are merged by their log-sum-exp.

Rank r has the pieces r and 2 cp - 1 - r of a row of 2 cp pieces (zig-zag), so that under a causal mask every step of
the ring is equally much work for each rank:

    step 0        its own keys         causal                      (both pieces)
    from j < r    piece j              all queries see it          (its other piece is later than all of them)
    from j > r    both pieces          the later queries see them  (the earlier ones see neither)

This is Ring Attention (arXiv 2310.01889) with the balance of the Striped and zig-zag variants (arXiv 2311.09431). A
rank holds two sets of keys and values at a time: the next ones arrive while it computes. Backward goes round once more
with the gradients of keys and values, so a rank saves only its own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm import Group, Lane
from shoal.device import applied, has_flash_attention

PURPOSE = "attention"
aten = torch.ops.aten


@dataclass(frozen=True)
class Block:
    """The part of this rank's queries that sees a part of the present keys.

    queries, keys: slices of the tokens
    causal: a query sees no later keys
    mask: [B, 1, q, k], true where a query sees a key; None: no further mask
    """

    queries: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None


@dataclass(frozen=True)
class Ring:
    """The ring of a call of attention.

    group: the ranks, in order of their first piece
    lane: on it keys and values are sent
    causal, scale: of the scores
    documents: [B, T / cp] by rank, a token sees those of its own document; None: all are one
    """

    group: Group
    lane: Lane
    causal: bool
    scale: float
    documents: tuple[Tensor, ...] | None = None

    def block(self, source: int, tokens: int) -> Block:
        """Returns which queries of this rank see which keys of the rank `source`; a rank has `tokens` tokens of a
        row."""
        rank, half, whole = self.group.rank, tokens // 2, slice(None)
        if not self.causal:
            found = Block(whole, whole)
        elif source == rank:
            found = Block(whole, whole, causal=True)
        elif source < rank:
            found = Block(whole, slice(0, half))
        else:
            found = Block(slice(half, tokens), whole)
        if self.documents is None:
            return found
        mine, theirs = self.documents[rank][:, found.queries], self.documents[source][:, found.keys]
        mask = mine[:, None, :, None] == theirs[:, None, None, :]
        return Block(found.queries, found.keys, False, mask.tril() if found.causal else mask)

    def visits(self, *mine: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yields (rank, its tensors) for each rank, this one first; the next rank's tensors arrive meanwhile."""
        size, rank = self.group.size, self.group.rank
        here = torch.stack(mine)
        for step in range(size):
            coming = None
            if step < size - 1:
                coming = torch.empty_like(here)
                self.lane.submit(
                    lambda out=coming, sent=here: self._pass_on(out, sent),  # type: ignore[misc]
                    "keys and values",
                )
            yield (rank - step) % size, here.unbind(0)
            if coming is not None:
                self.lane.wait()
                here = coming

    def _pass_on(self, out: Tensor, sent: Tensor) -> None:
        size, rank = self.group.size, self.group.rank
        self.group.exchange(out, (rank - 1) % size, sent, (rank + 1) % size, PURPOSE)

    def pass_on(self, sent: Tensor) -> Tensor:
        """Sends `sent` to the next rank; returns what the rank before this one has sent."""
        out = torch.empty_like(sent)
        self.lane.submit(lambda: self._pass_on(out, sent), "gradients of keys and values")
        self.lane.wait()
        return out


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """Returns softmax(q k^T scale) v of this rank's queries over the keys and values of all ranks.

    `query`, `key`, `value`: [B, H, T / cp, K]; keys and values may have fewer heads, which divide those of the queries.
    """
    return applied(_RingAttention, query, key, value, ring)[0]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(query, dtype=_wide(query.dtype))
        logsumexp = out.new_full(query.shape[:-1], -math.inf)
        for source, (keys, values) in ring.visits(key, value):
            block = ring.block(source, query.shape[2])
            part, total = attend(
                query[:, :, block.queries], keys[:, :, block.keys], values[:, :, block.keys], block, ring.scale
            )
            so_far, at = out[:, :, block.queries], logsumexp[:, :, block.queries]
            both = torch.logaddexp(at, total)
            weight = _share(at, both)
            so_far.mul_(weight).add_(part * _share(total, both))
            at.copy_(both)
        return out.to(query.dtype), logsumexp

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Ring], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.ring = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, logsumexp = ctx.saved_tensors
        ring, grad = ctx.ring, grads[0].contiguous()
        grad_query = torch.zeros_like(query, dtype=logsumexp.dtype)
        travelling = torch.zeros(2, *key.shape, dtype=logsumexp.dtype, device=key.device)
        for step, (source, (keys, values)) in enumerate(ring.visits(key, value)):
            if step:
                travelling = ring.pass_on(travelling)
            block = ring.block(source, query.shape[2])
            q, k = block.queries, block.keys
            gradients = attend_backward(
                grad[:, :, q],
                query[:, :, q],
                keys[:, :, k],
                values[:, :, k],
                out[:, :, q],
                logsumexp[:, :, q],
                block,
                ring.scale,
            )
            grad_query[:, :, q] += gradients[0]
            travelling[0][:, :, k] += gradients[1]
            travelling[1][:, :, k] += gradients[2]
        grad_key, grad_value = ring.pass_on(travelling)  # those held last are the next rank's: one more step home
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None


def of_one_width(
    attend: Callable[..., Tensor], tensors: Sequence[Tensor], options: Sequence[Any], scale: float | None, gqa: bool
) -> Tensor:
    """Computes `attend` of queries, keys, and values that are narrower or wider than keys: zeros make them alike, so
    that they travel together."""
    own, value = tensors[0].shape[-1], tensors[2].shape[-1]
    wide = [F.pad(each, (0, max(own, value) - each.shape[-1])) for each in tensors]
    return attend(*wide, *options, scale or own**-0.5, gqa)[..., :value]


def attend(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention over the keys of one block, and the log-sum-exp [B, H, q] of its scores, -inf if a query sees
    none."""
    key, value = (_as_many(each, query.shape[1]) for each in (key, value))
    if block.mask is None:
        if query.is_cpu:
            return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, block.causal, scale=scale)
        if has_flash_attention(query):
            return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, block.causal, scale=scale)[:2]
    scores = _scores(query, key, block, scale)
    total = scores.logsumexp(-1)
    # 0 where a query sees no key of the block
    weights = (scores - total.masked_fill(total == -math.inf, 0.0).unsqueeze(-1)).exp()
    return (weights @ value.to(weights.dtype)), total


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what one block adds to the gradients of queries, keys and values.

    `out` and `logsumexp` are those over all blocks, `grad` is the gradient of `out`.
    """
    keys = key.shape[1]
    key, value = (_as_many(each, query.shape[1]) for each in (key, value))
    tensors = [each.contiguous() for each in (grad, query, key, value, out, logsumexp)]
    if block.mask is None and query.is_cpu:
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, block.causal, scale=scale)
    elif block.mask is None and has_flash_attention(query):
        lengths = (None, None, query.shape[2], key.shape[2])
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        found = aten._scaled_dot_product_flash_attention_backward(
            *tensors, *lengths, 0.0, block.causal, nothing, nothing, scale=scale
        )
    else:
        wide = logsumexp.dtype
        weights = (_scores(query, key, block, scale) - logsumexp.unsqueeze(-1)).exp()
        grad, out, value = grad.to(wide), out.to(wide), value.to(wide)
        inner = (grad * out).sum(-1, keepdim=True)
        by_score = weights * (grad @ value.transpose(-2, -1) - inner) * scale
        found = by_score @ key.to(wide), by_score.transpose(-2, -1) @ query.to(wide), weights.transpose(-2, -1) @ grad
    of_query, of_key, of_value = found
    return of_query, _together(of_key, keys), _together(of_value, keys)


def _scores(query: Tensor, key: Tensor, block: Block, scale: float) -> Tensor:
    wide = _wide(query.dtype)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores if block.mask is None else scores.masked_fill(~block.mask, -math.inf)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _share(of: Tensor, all_: Tensor) -> Tensor:
    """Returns exp(of - all_) as a weight per row; 0 where nothing has been seen yet."""
    return (of - all_).masked_fill(of == -math.inf, -math.inf).exp().unsqueeze(-1)


def _as_many(x: Tensor, heads: int) -> Tensor:
    """Repeats the heads of keys or values [B, H, T, K] for each head of the queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _together(gradient: Tensor, heads: int) -> Tensor:
    """Sums a gradient over the heads of queries that share one of the `heads` of keys."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)

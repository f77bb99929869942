"""Replacements of `F.dropout` and `F.scaled_dot_product_attention` by keyed ones during a step, also inside torch's own
modules, and inside what `torch.utils.checkpoint` runs again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.module.random.by_thread import OpenByThread
from shoal.module.repeated import Again, forget, note


class Draws(Protocol):
    """The source of a forward's random draws: see `keyed.Randomness`."""

    active: bool
    keyed: bool
    attend: Callable[..., Tensor] | None

    def drop(self, x: Tensor, p: float, key: Tensor) -> Tensor: ...
    def next_key(self) -> Tensor: ...
    def again(self) -> Again: ...


torch_dropout = F.dropout
torch_attention = F.scaled_dot_product_attention


class _Open(OpenByThread[Draws]):
    """The draws that `F.dropout` takes its masks from.

    `attends`: whether some, of whatever thread, compute attention by themselves. It is a plain value, on which a graph
    of dynamo can be guarded; the graph breaks at the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attends = False

    def _give_way(self) -> None:
        F.dropout, F.scaled_dot_product_attention = _stand_ins
        note(self._noted)

    def _put_back(self) -> None:
        F.dropout, F.scaled_dot_product_attention = torch_dropout, torch_attention
        forget(self._noted)

    def _noted(self) -> Again | None:
        randomness = self.here()
        return None if randomness is None or not randomness.keyed else randomness.again()

    def _look(self) -> None:
        self.attends = any(each.attend is not None for mine in self._by_thread.values() for each in mine)


_open = _Open()


@contextmanager
def keyed_functional(randomness: Draws) -> Iterator[None]:
    """Makes `F.dropout` and the dropout of `F.scaled_dot_product_attention` keyed in this thread, inside the context.

    It applies to torch's own modules too. Attention is computed by `randomness.attend` if that is set.
    """
    before = randomness.active
    _open.enter(randomness)
    randomness.active = True
    try:
        yield
    finally:
        randomness.active = before
        _open.leave()


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Stands in for `F.dropout`. A compiled graph breaks only where something is dropped."""
    return input if not training or p == 0.0 else _drop(input, p, inplace)


@torch.compiler.disable
def _drop(input: Tensor, p: float, inplace: bool) -> Tensor:
    randomness = _open.here()
    if randomness is None or not randomness.keyed:
        return torch_dropout(input, p, True, inplace)
    dropped = randomness.drop(input, p, randomness.next_key())
    return input.copy_(dropped) if inplace else dropped


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Stands in for `F.scaled_dot_product_attention`."""
    if not _open.attends:
        return attention(*args, **kwargs)
    randomness = _open.here()
    attend = attention if randomness is None or randomness.attend is None else randomness.attend
    return attend(*args, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Tensor:
    """Computes `F.scaled_dot_product_attention`, step by step if its dropout is keyed, since the kernels draw
    inside."""
    randomness = None if dropout_p == 0.0 else _open.here()
    if randomness is None or not randomness.keyed:
        return torch_attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)
    weights = attention_weights(query, key, attn_mask, is_causal, **rest)
    groups = query.shape[-3] // value.shape[-3] if rest.get("enable_gqa") else 1
    return _dropout(weights, dropout_p) @ value.repeat_interleave(groups, -3)


_stand_ins: tuple[Any, Any] = (_dropout, _attention)


def attention_weights(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns softmax(q k^T scale + mask), [..., heads, T, S], as torch's documentation of the function defines it."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1.0 / math.sqrt(query.shape[-1]))
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


def dropout_of(kernel: Any, args: Sequence[Any], given: Mapping[str, Any]) -> float | None:
    """Returns the dropout with which a kernel of attention is called; None for other operations of torch."""
    names = [argument.name for argument in kernel._schema.arguments]
    if "dropout_p" not in names:
        return None
    at = names.index("dropout_p")
    return float(args[at] if at < len(args) else given.get("dropout_p", 0.0))

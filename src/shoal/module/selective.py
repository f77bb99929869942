"""Selective recompute: inside a block, the results of some operations are kept, the others are computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shoal.errors import UserError
from shoal.module.random import dropout_of

_aten = torch.ops.aten
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "matmul": (
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._grouped_mm.default,
    ),
    "attention": (
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    ),
    "convolution": (_aten.convolution.default,),
}
"""The operations that `selective` can save, by name."""
_COMPUTED_AGAIN: Any = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)
"""What torch stores of an operation that is not kept; None in versions that ask the policy a second time."""
SAVE = ("matmul", "attention")
"""The operations that `selective` saves where none are named."""

Contexts = tuple[AbstractContextManager[Any], Callable[[], AbstractContextManager[Any]]]
"""That of a first forward, and a maker of that of each forward which repeats it."""


def saved_by(save: Sequence[str]) -> frozenset[Any]:
    """Returns the operations of these names. Raises UserError for one that is unknown."""
    unknown = [name for name in save if name not in OPERATIONS]
    if unknown or isinstance(save, str):
        raise UserError(f"plan.recompute: save = {save!r}: give a list of {', '.join(OPERATIONS)}")
    return frozenset(operation for name in save for operation in OPERATIONS[name])


def keeping(save: Sequence[str]) -> Callable[[], Contexts]:
    """Returns what makes the contexts of a block of which the results of the operations `save` are kept."""
    saved = saved_by(save)

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # were attention kept that draws its dropout, what draws after it would draw in backward what it drew
        keeps = operation in saved and not dropout_of(operation, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(_selective_contexts, policy)


def _selective_contexts(policy: Callable[..., CheckpointPolicy]) -> Contexts:
    """Makes torch's contexts, of which the second one takes out what it finds: it gets a copy each time, since a
    backward in two halves (see pipeline.split_backward), or one that keeps its graph, repeats the forward twice."""
    first, second = create_selective_checkpoint_contexts(policy)

    @contextmanager
    def again() -> Iterator[None]:
        for results in first.storage.values():
            _leave_out_changed(results)
        second.storage = copy(first.storage)
        second.storage.update((operation, copy(results)) for operation, results in first.storage.items())
        try:
            with second:
                yield
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise UserError(
                "plan.recompute = selective: the model changes the result of an operation in place that is kept for "
                'backward: make that out of place (x = x + y), name other operations in save, or take "full"'
            ) from error

    return first, again


def _leave_out_changed(results: Any) -> None:
    """Has those of an operation's results computed again that were changed in place after they had been kept, as the
    loops inside nn.LSTM do: what is kept is no copy."""
    if _COMPUTED_AGAIN is None:
        return
    for place, result in results.items():
        if any(each.val._version != each.version for each in tree_leaves(result) if _is_versioned(each)):
            results[place] = _COMPUTED_AGAIN


def _is_versioned(entry: Any) -> bool:
    return getattr(entry, "version", None) is not None

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
from shoal.module.record import storage_of
from shoal.plan import Option, option_name, option_parameters

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


def selects(option: Option) -> bool:
    """Whether a plan's `recompute` has some blocks keep what some operations give."""
    name = option_name(option, "recompute")
    return name == "selective" or (name == "blocks" and bool(option_parameters(option).get("selective")))


def saved_by(save: Sequence[str]) -> frozenset[Any]:
    """Returns the operations of these names. Raises UserError for one that is unknown."""
    unknown = [name for name in save if name not in OPERATIONS]
    if unknown or isinstance(save, str):
        raise UserError(f"plan.recompute: save = {save!r}: give a list of {', '.join(OPERATIONS)}")
    return frozenset(operation for name in save for operation in OPERATIONS[name])


def keeping(save: Sequence[str]) -> Callable[[], Contexts]:
    """Returns what makes the contexts of a block of which the results of the operations `save` are kept."""
    return partial(_selective_contexts, saved_by(save))


def _selective_contexts(saved: frozenset[Any]) -> Contexts:
    """Makes torch's contexts, of which the second one takes out what it finds: it gets a copy each time, since a
    backward in two halves (see pipeline.split_backward), or one that keeps its graph, repeats the forward twice."""
    writes = _Writes()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # were attention kept that draws its dropout, what draws after it would draw in backward what it drew
        keeps = operation in saved and not dropout_of(operation, args, kwargs)
        if not context.is_recompute:
            writes.follow(operation, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)

    @contextmanager
    def again() -> Iterator[None]:
        for operation, results in first.storage.items():
            _leave_out_changed(results, partial(writes.changed, operation))
        second.storage = copy(first.storage)
        second.storage.update((operation, copy(results)) for operation, results in first.storage.items())
        try:
            with second:
                yield
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise _changed() from error

    return first, again


class _Writes:
    """Sees in a first forward what is written to the results of operations, also where no version of theirs tells: to
    the pieces that nn.GRU takes of its gates, to `result.data`."""

    def __init__(self) -> None:
        self._number = 0
        self._calls: dict[Any, list[int]] = {}  # by operation, the numbers of its calls
        self._last: dict[int, int] = {}  # by memory, the number of the last call that wrote there

    def follow(self, operation: Any, args: Any, kwargs: Any) -> None:
        self._number += 1
        self._calls.setdefault(operation, []).append(self._number)
        if operation._schema.is_mutable:
            given = zip(operation._schema.arguments, args, strict=False)
            named = [(each, kwargs[each.name]) for each in operation._schema.arguments if each.name in kwargs]
            for argument, value in (*given, *named):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._last.update(
                        (storage_of(each), self._number)
                        for each in tree_leaves(value)
                        if isinstance(each, torch.Tensor)
                    )

    def changed(self, operation: Any, place: int, kept: Any) -> bool:
        """Whether a tensor `kept` of the call of `operation` at `place` was written to later: as long as it is kept no
        other has its memory."""
        calls = self._calls.get(operation, ())
        return place < len(calls) and self._last.get(storage_of(kept), 0) > calls[place]


def _leave_out_changed(results: Any, written: Callable[[int, Any], bool]) -> None:
    """Has those of an operation's results computed again that were changed in place after they had been kept, as the
    loops inside nn.LSTM do: what is kept is no copy. `written`: whether what is kept of a call was."""
    for place, result in results.items():
        kept = [each for each in tree_leaves(result) if _is_versioned(each)]
        if any(each.val._version != each.version or written(place, each.val) for each in kept):
            if _COMPUTED_AGAIN is None:
                raise _changed()
            results[place] = _COMPUTED_AGAIN


def _changed() -> UserError:
    return UserError(
        "plan.recompute = selective: the model changes the result of an operation in place that is kept for "
        'backward: make that out of place (x = x + y), name other operations in save, or take "full"'
    )


def _is_versioned(entry: Any) -> bool:
    return getattr(entry, "version", None) is not None

"""The border between a model and what calls it: there inputs are cast to the model's dtype, results to the master's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shoal.module.calls import calls_of
from shoal.module.repeated import Again, forget, note
from shoal.module.scripted import is_scripted
from shoal.precision import Precision, cast_floating, is_floating


def cast_at_the_border(module: nn.Module, chosen: Precision, closed: Collection[nn.Module] = ()) -> None:
    """Hooks `module` and its parts: the one that is called from outside, as a loss may call `model.encoder`, casts
    floating arguments to the model's dtype, results to the master's.

    `closed`: modules inside of which nothing is hooked, since hooks there would be compiled, or cost time.
    """

    @_border_hook
    def inputs(part: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floating((args, kwargs), chosen.model) if part is module or _from_outside(hooked) else None

    def outputs(part: nn.Module, args: Any, output: Any) -> Any:
        return _cast_results(output, chosen.master) if part is module or _from_outside(hooked) else None

    hooked = _Hooked(inputs)
    for part in (module, *_parts(module, {id(each) for each in closed})):
        if chosen.low or chosen.model != torch.float32:
            part.register_forward_pre_hook(inputs, with_kwargs=True)
        if chosen.low:
            part.register_forward_hook(outputs)


def _border_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a hook as one of the border, by which a checkpointed call knows whether it is outside of a model."""
    hook.is_at_border = True  # type: ignore[attr-defined]
    return hook


class _Hooked:
    """The modules that have a hook, and copies of them, which have it too."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __contains__(self, part: object) -> bool:
        return isinstance(part, nn.Module) and self._hook in part._forward_pre_hooks.values()


def _parts(module: nn.Module, closed: Collection[int]) -> list[nn.Module]:
    """Returns the modules inside of `module` that have an outside, down to those that are `closed`."""
    found: dict[nn.Module, None] = {}
    left = [module]
    while left:
        each = left.pop()
        if id(each) in closed or is_scripted(each):
            continue
        inside = [child for child in each.children() if child not in found and child is not module]
        found |= dict.fromkeys(inside)
        left += inside
    return [each for each in found if each._compiled_call_impl is None]


def _from_outside(known: _Hooked) -> bool:
    """Whether of the modules `known` only one is being called: by the loss, not by another, nor again by backward, but
    where that runs again what the loss has checkpointed."""
    if torch.compiler.is_compiling():  # the forward of a module around it
        return False
    is_first = torch._C._current_graph_task_id() == -1 or _again.is_open
    return is_first and next(islice(calls_of(known), 1, None), None) is None


class _AnyModel:
    """The modules at whose border something is cast, of whatever model."""

    def __contains__(self, part: object) -> bool:
        hooks = part._forward_pre_hooks.values() if isinstance(part, nn.Module) else ()
        return any(hasattr(hook, "is_at_border") for hook in hooks)


class _Again(threading.local):
    """Whether backward runs again, in this thread, what a loss has checkpointed outside of its model."""

    is_open = False


_again = _Again()


@contextmanager
def _from_outside_again() -> Iterator[None]:
    before, _again.is_open = _again.is_open, True
    try:
        yield
    finally:
        _again.is_open = before


def _outside() -> Again | None:
    """Notes of a checkpointed call that begins outside of all models that it is outside, too, where it runs again."""
    return _from_outside_again if next(calls_of(_AnyModel()), None) is None else None


@contextmanager
def checkpoints_outside() -> Iterator[None]:
    """Inside, where a loss is computed, what it checkpoints outside of its model is cast again at the border when
    backward runs it again."""
    note(_outside)
    try:
        yield
    finally:
        forget(_outside)


def _cast_results(tree: Any, dtype: torch.dtype) -> Any:
    """Casts as `cast_floating` does, also in the fields of dataclasses and namespaces, in a copy of each."""
    return tree_map(partial(_cast_result, dtype), tree)


def _cast_result(dtype: torch.dtype, leaf: Any) -> Any:
    if is_floating(leaf):
        return leaf.to(dtype)
    if isinstance(leaf, type) or not (is_dataclass(leaf) or isinstance(leaf, SimpleNamespace)):
        return leaf
    names = [each.name for each in fields(leaf)] if is_dataclass(leaf) else [*vars(leaf)]
    found = copy(leaf)
    for name in names:
        object.__setattr__(found, name, _cast_results(getattr(leaf, name), dtype))  # also where it is frozen
    return found

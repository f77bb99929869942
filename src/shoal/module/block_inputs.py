"""What a block was given, for a second forward in backward that has to find the same."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.errors import UserError
from shoal.module.record import storage_of

MODIFIED = "modified by an inplace operation"
"""What torch's error has where a tensor that backward needs is no longer as its forward has left it."""
_REMEDY = "make the operation out of place (x = x + y, inplace=False), or train without plan.recompute"


class BlockInputs:
    """The arguments of one forward of a block, of which copies are kept where the forward changes them in place. What
    it puts into lists, dicts and objects among them is there once it has run, and not put there again in backward.

    name: the block's, for errors
    args, kwargs: what its first forward is given; tensors in `args` itself are kept as autograd keeps what it saves
    copied: the places among all leaves of them that are copied before it; None: all, to learn which it changes
    """

    def __init__(self, name: str, args: Any, kwargs: Any, copied: Collection[int] | None) -> None:
        self._name = name
        self._leaves, self._tree = tree_flatten((args, kwargs))
        tensors = {place: leaf for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)}
        self._devices = dict.fromkeys(tensor.device for tensor in tensors.values())
        self._versions = {place: tensor._version for place, tensor in tensors.items() if not tensor.is_inference()}
        direct = {id(each) for each in args}
        self._direct = [place for place, tensor in tensors.items() if id(tensor) in direct]
        chosen = self._versions.keys() if copied is None else self._versions.keys() & copied
        by_tensor = {id(tensors[place]): tensors[place] for place in chosen}  # one may be given twice
        copies = {key: _Copy(tensor.detach().clone(), tensor.requires_grad) for key, tensor in by_tensor.items()}
        self._copies = {place: copies[id(tensors[place])] for place in chosen}
        self._numbers: list[int] = []  # which of the tensors kept is at each of these places
        self._saved: Any = None  # of a graph that keeps those at `_direct`, for as long as this tensor lives
        of_objects = {place: _attributes(leaf) for place, leaf in enumerate(self._leaves)}
        self._objects = {place: own for place, own in of_objects.items() if own}
        self._first: Any = args, kwargs
        self._ready: list[Any] = []

    def devices(self) -> list[Tensor]:
        """Returns empty tensors that tell torch's checkpoint whose generators the forward may draw from."""
        return [torch.empty(0, device=device) for device in self._devices]

    def run(self, forward: Callable[..., Any]) -> Any:
        """Calls `forward`: the first time with what the block was given, then with what `found_again` made ready."""
        args, kwargs = self._first or tree_unflatten(self._ready, self._tree)
        self._first, self._ready = None, []
        return forward(*args, **kwargs)

    def changed(self) -> set[int]:
        """Returns the places whose tensors the first forward, which is over, has changed, and lets go of the others'
        copies.

        Raises UserError where there is no copy, or where two that share memory were changed.
        """
        found = {place for place, version in self._versions.items() if self._leaves[place]._version != version}
        if not found <= self._copies.keys():
            raise UserError(
                f"plan.recompute: a forward of {self._name} changed an input in place that its first forward had left "
                f"as it was, so there is no copy for the forward that backward repeats: {_REMEDY}"
            )
        distinct = {id(self._leaves[place]): self._leaves[place] for place in found}.values()
        if len({storage_of(tensor) for tensor in distinct}) < len(distinct):
            raise UserError(
                f"plan.recompute: a forward of {self._name} changed an input in place that shares its memory with "
                f"another input, and backward repeats it: {_REMEDY}"
            )
        self._copies = {place: copy for place, copy in self._copies.items() if place in found}
        now = {at: _attributes(self._leaves[at]) for at in self._objects}
        self._objects = {at: own for at, own in self._objects.items() if not _is_as(now[at], own)}
        self._direct = [place for place in self._direct if place not in found]
        kept = {id(self._leaves[place]): self._leaves[place] for place in self._direct}  # one may be given twice
        self._numbers = [list(kept).index(id(self._leaves[place])) for place in self._direct]
        self._saved = _Save.apply(torch.empty(0, requires_grad=True), *kept.values())
        for place in (*found, *self._direct):  # a changed one is of the graph that the forward made, which keeps this
            self._leaves[place] = None
            self._versions.pop(place, None)
        return found

    def found_again(self) -> AbstractContextManager[None]:
        """Makes ready, for one more forward, what the first one found: also in the middle of it, where that takes a
        gradient of its own.

        Raises UserError if something else has changed it since.
        """
        for place, version in self._versions.items():
            if place not in self._copies and self._leaves[place]._version != version:
                raise self._changed_behind()
        saved = {} if self._saved is None else self._found_saved()
        fresh = {id(copy): copy.fresh() for copy in self._copies.values()}
        found = saved | {place: fresh[id(copy)] for place, copy in self._copies.items()}
        found |= {place: _with(self._leaves[place], own) for place, own in self._objects.items()}
        self._ready = [found.get(place, leaf) for place, leaf in enumerate(self._leaves)]
        return nullcontext()

    def _found_saved(self) -> dict[int, Any]:
        """Returns what autograd has kept of a first forward that is over, by place."""
        try:
            kept = self._saved.grad_fn.saved_tensors
        except RuntimeError as error:
            if MODIFIED not in str(error):
                raise
            raise self._changed_behind() from error
        return {place: kept[number] for place, number in zip(self._direct, self._numbers, strict=True)}

    def _changed_behind(self) -> UserError:
        return UserError(
            f"plan.recompute: an input of {self._name} was changed in place after its forward, which backward repeats: "
            f"{_REMEDY}"
        )


def _attributes(leaf: Any) -> dict[str, Any]:
    """The attributes of an object, with copies of the lists and dicts among them; nothing of a tensor, a module, a
    class or a function."""
    if isinstance(leaf, Tensor | nn.Module | type) or callable(leaf):
        return {}
    return {key: _copy(each) for key, each in getattr(leaf, "__dict__", {}).items()}


def _copy(value: Any) -> Any:
    """A copy of a list or dict, with those in it; anything else as it is."""
    if type(value) is dict:
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if type(value) is list else value


def _is_as(one: Any, other: Any) -> bool:
    """Whether a list or dict holds the very things that its copy does, or another value is the same."""
    if type(one) is type(other) is dict:
        return one.keys() == other.keys() and all(_is_as(one[key], other[key]) for key in one)
    if type(one) is type(other) is list:
        return len(one) == len(other) and all(map(_is_as, one, other))
    return one is other


def _with(leaf: Any, attributes: dict[str, Any]) -> Any:
    """Another object of the same class, with these attributes."""
    found = copy(leaf)
    found.__dict__.clear()
    found.__dict__.update(_copy(attributes))
    return found


class _Save(torch.autograd.Function):
    """Saves tensors as those that backward needs: hooks on saved tensors see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _Copy:
    """The values of a tensor as they were, and whether it has a gradient."""

    def __init__(self, values: Tensor, requires_grad: bool) -> None:
        self._values, self._requires_grad = values, requires_grad

    def fresh(self) -> Tensor:
        """Returns a tensor that may be changed in place: a result, since leaves of a graph may not."""
        return self._values.detach().requires_grad_(self._requires_grad).clone()

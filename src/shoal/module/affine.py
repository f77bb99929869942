"""Finds the buffers that a forward writes by an affine rule, new = keep * old + a term of the microbatch, so that the
runs of several ranks can be merged.

`keep` is a number: 0.9 of a moving average, 1 of a sum or a counter, 0 of a value that is set. The operations of a
forward are observed one by one below autograd, where none is hidden. If a buffer enters any other operation (a product
with the input, `.item()`), the forward depends on it, and then later microbatches depend on earlier ones; not where the
same forward has set all of it before (rotary frequencies that are chosen by the length of the rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.comm.wire import sent

aten = torch.ops.aten
_VIEWS = {
    aten.detach,
    aten.alias,
    aten.view,
    aten._unsafe_view,
    aten.unsqueeze,
    aten.squeeze,
    aten.t,
    aten.transpose,
    aten.permute,
    aten.select,
    aten.slice,
    aten.expand,
    aten.as_strided,
}
_COPIES = {aten.clone, aten._to_copy, aten.lift_fresh_copy}


@sent
@dataclass(frozen=True)
class Rule:
    """The rule of a buffer: new = `keep` * old + a term of the microbatch.

    `writes`: the number of in-place writes in a forward; None if the buffer is re-bound.
    """

    keep: float
    writes: int | None


@dataclass(frozen=True)
class _Form:
    """The form of a tensor: `keep` * the buffer `name` + a term of the microbatch."""

    name: str
    keep: float


class Affine(TorchDispatchMode):
    """Follows `buffers` through a forward; `odd[name]` is the operation that leaves a buffer without a rule."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.odd: dict[str, str] = {}
        self._written: set[str] = set()
        self._before = {name: (buffer, buffer._version) for name, buffer in buffers.items()}
        self._forms = {_storage(buffer): _Form(name, 1.0) for name, buffer in buffers.items()}
        self._numel = {name: buffer.numel() for name, buffer in buffers.items()}
        self._alive: list[Tensor] = []  # storages are known by address, which must not be reused

    def leaves(self, outputs: Any) -> None:
        """Notes the results of the forward; one that contains a buffer depends on it."""
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and (form := self._forms.get(_storage(each))) is not None:
                self.odd.setdefault(form.name, "its result")

    def read(self, tensor: Tensor, how: str) -> None:
        """Notes values that the forward takes out of a tensor by no operation (see module.reads)."""
        form = self._forms.get(_storage(tensor))
        if form is not None and form.keep:
            self.odd.setdefault(form.name, how)

    def rules(self, now: Mapping[str, Tensor]) -> dict[str, Rule | str]:
        """Returns the rule of each buffer of `now`, these after the forward, that was written, or why it has none."""
        found: dict[str, Rule | str] = {}
        for name, (buffer, version) in self._before.items():
            if name not in now:
                continue
            writes = buffer._version - version if now[name] is buffer else None
            if writes == 0 and name not in self._written:
                continue
            form = self._forms.get(_storage(now[name]), _Form(name, 0.0))
            if name in self.odd:
                found[name] = f"it goes into {self.odd[name]}"
            elif form.name != name or now[name].shape != buffer.shape:
                found[name] = "another tensor takes its place"
            else:
                found[name] = Rule(form.keep, writes)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        forms = [form for each in given if (form := self._forms.get(_storage(each))) is not None]
        if not forms:
            return func(*args, **kwargs)
        packet, target = func.overloadpacket, args[0] if _writes_first(func) else None
        keep = None if _differentiable(given, target) else self._keep(packet, func, args, kwargs)
        out = func(*args, **kwargs)
        if packet in _VIEWS:
            return out
        if target is not None:
            self._wrote(target, func, keep, forms)
        elif keep is not None and isinstance(out, Tensor):
            self._forms[_storage(out)] = _Form(forms[0].name, keep)
            self._alive.append(out)
        else:
            self._refuse(forms, func)
        return out

    def _wrote(self, target: Tensor, func: Any, keep: float | None, forms: list[_Form]) -> None:
        storage, own = _storage(target), self._forms.get(_storage(target))
        if own is not None and storage == _storage(self._before[own.name][0]):  # not of a sum with the buffer in it
            self._written.add(own.name)
        name = own.name if own is not None else forms[0].name
        if keep is None or (own is not None and target.numel() != self._numel[name]):
            self._refuse(forms if own is None else [own, *forms], func)
            return
        self._forms[storage] = _Form(name, keep)
        self._alive.append(target)

    def _refuse(self, forms: list[_Form], func: Any) -> None:
        for form in forms:
            if form.keep:
                self.odd.setdefault(form.name, str(func))

    def _keep(self, packet: Any, func: Any, args: Any, kwargs: Any) -> float | None:
        """Returns the factor of the buffer in the result of an operation; None if the result is no such sum."""
        name = str(packet).removeprefix("aten.").rstrip("_")
        parts = [self._forms.get(_storage(each)) if isinstance(each, Tensor) else None for each in args]
        if len({part.name for part in parts if part is not None}) > 1 or any(
            isinstance(each, (list, tuple)) for each in args[:1]
        ):
            return None
        keeps = [0.0 if part is None else part.keep for part in parts]
        number = args[1] if len(args) > 1 and isinstance(args[1], int | float) else None
        if packet in _COPIES:
            to = kwargs.get("dtype")
            return keeps[0] if to is None or to.is_floating_point == args[0].dtype.is_floating_point else None
        if name == "copy":
            return keeps[1] if args[1].is_floating_point() == args[0].is_floating_point() else None
        if name in ("fill", "zero"):
            return 0.0 if len(args) < 2 or parts[1] is None else None
        if name == "neg":
            return -keeps[0]
        if name in ("add", "sub", "rsub"):
            factor = kwargs.get("alpha", args[2] if len(args) > 2 else 1) * (1 if name == "add" else -1)
            return keeps[0] + factor * keeps[1] if name != "rsub" else keeps[1] + factor * keeps[0]
        if name == "mul" and number is not None:
            return keeps[0] * number
        if name == "div" and number is not None and not kwargs:
            return keeps[0] / number
        if name == "lerp" and isinstance(args[2], int | float):
            return keeps[0] * (1 - args[2]) + keeps[1] * args[2]
        if name in ("addcmul", "addcdiv") and not any(parts[1:]):
            return keeps[0]
        return None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _writes_first(func: Any) -> bool:
    """True if an operation writes to its first argument in place."""
    arguments = func._schema.arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _differentiable(given: list[Tensor], target: Tensor | None) -> bool:
    """True if the result of an operation carries a gradient: the forward then depends on it."""
    return target is None and torch.is_grad_enabled() and any(each.requires_grad for each in given)

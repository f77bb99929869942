"""What fake tensors lack, made up: numbers that are read, addresses, and what libraries ask of real ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from shoal.planner.workspace import called, with_workspace

LIFTED = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
FOLLOWED = (torch.ops.aten.select, torch.ops.aten.unbind, torch.ops.aten.view, torch.ops.aten._to_copy)
COMPARED = (torch.ops.aten.eq.Scalar, torch.ops.aten.ne.Scalar)
ROWS = (torch.ops.aten.clone.default, torch.ops.aten._coalesce.default)
"""Operations on gradients that come as rows, which fake tensors lose."""
FLAGS = 4096
"""Numbers at most of a tensor that is followed."""


class Values(TorchDispatchMode):
    """Gives a number for each that is read of a fake tensor: its own where it is one of the flags that ranks tell each
    other, which are made of numbers and read again."""

    def __init__(self) -> None:
        super().__init__()
        self._alls: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._flags: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            known, dtype = self._flags.get(args[0], args[0].constant), args[0].dtype
            if known is not None:
                with _disable_current_modes():
                    return known.item()
            return args[0] in self._alls if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func in ROWS and isinstance(args[0], FakeTensor) and args[0].layout is torch.sparse_coo:
            return _same_rows(args[0])
        out = with_workspace(func, args, called(func, args, kwargs or {}))
        if func.overloadpacket is torch.ops.aten.all:
            self._alls[out] = None
        elif func is torch.ops.aten.sum.default and args[0].dtype == torch.bool:
            with _disable_current_modes():
                self._flags[out] = torch.tensor(args[0].numel())  # all of a mask is True
        self._follow(func, args, kwargs or {}, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keeps the numbers of flags, and of what is taken of them, until something writes to them."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return
        known = self._flags.get(first)
        with _disable_current_modes():
            if func in LIFTED and not isinstance(first, FakeTensor) and not first.is_floating_point():
                if first.numel() <= FLAGS:
                    self._flags[out] = first.clone()
            elif known is not None and (func.overloadpacket in FOLLOWED or func in COMPARED):
                found = func(known, *args[1:], **kwargs)
                for each, value in zip(_several(out), _several(found), strict=True):
                    self._flags[each] = value
            elif known is not None and func._schema.is_mutable:
                del self._flags[first]


def _same_rows(gradient: Tensor) -> Tensor:
    """A copy of a sparse tensor with as many rows: all are taken to be different ones."""
    indices, values = gradient._indices().clone(), gradient._values().clone()
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=False)


def _several(values: Any) -> Sequence[Tensor]:
    return [values] if isinstance(values, Tensor) else list(values)


_PATCHED: dict[tuple[int, str], list[Any]] = {}
"""What is another one for a while, with what it was and how many want it so."""
_MISSING = object()
"""What it was where there was none."""
_patching = threading.Lock()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives `owner` another attribute for a while, which may be the same on several threads; the last one gives back
    what was there."""
    key = id(owner), name
    with _patching:
        entry = _PATCHED.setdefault(key, [vars(owner).get(name, _MISSING), 0])
        entry[1] += 1
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _patching:
            entry[1] -= 1
            if not entry[1]:
                del _PATCHED[key]
                if entry[0] is _MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, entry[0])


@contextmanager
def as_if_real() -> Iterator[None]:
    """transformers builds masks for fake tensors that it leaves out for real ones."""
    asked = sys.modules.get("transformers.utils.import_utils")
    if asked is None:
        yield
        return
    with patched(asked, "is_fake_tensor", lambda _: False):
        yield


@contextmanager
def addresses() -> Iterator[None]:
    """Gives each place in a fake storage an address of its own."""

    def data_ptr(tensor: Tensor) -> int:
        return (tensor.untyped_storage()._cdata << 20) + tensor.storage_offset() * tensor.element_size()

    with patched(FakeTensor, "data_ptr", data_ptr):
        yield

"""What a model asks of its numbers, and a backward of torch's: whether they are finite. Where there are none they all
are, as in training that goes well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from shoal.module.known_calls import NEW, KnownCalls

_aten = torch.ops.aten
_READ = _aten._local_scalar_dense.default
_NEVER = {_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default, _aten.isneginf.default}
_EQUAL = {_aten.eq.Tensor: True, _aten.eq.Scalar: True, _aten.ne.Tensor: False, _aten.ne.Scalar: False}
"""Comparisons, and whether they are true of what is equal: a finite number is itself, and none of the others."""
_KEEPS = {_aten.any, _aten.all, _aten.view, _aten._to_copy}
"""Operations that give of values that are all the same this value."""
_NOT = {_aten.logical_not, _aten.bitwise_not}
_BOTH = {_aten.mul: all, _aten.bitwise_and: all, _aten.logical_and: all, _aten.bitwise_or: any, _aten.logical_or: any}


class FiniteCalls(KnownCalls):
    """Known calls that answer whether tensors are finite: as if they were."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__(fakes)
        self._answers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of tensors of truths that are all the same

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ and (answer := self._answers.get(args[0])) is not None:
            return answer
        return self._noted(func, args, super().__torch_dispatch__(func, types, args, kwargs))

    def recall(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._noted(func, args, super().recall(func, args, kwargs))

    def _noted(self, func: Any, args: Sequence[Any], out: Any) -> Any:
        """Returns `out`, what an operation gave, of which it keeps the truth that is known."""
        if type(out) is not bool and out is not NEW and isinstance(out, Tensor) and out.dtype == torch.bool:
            answer = None if func._schema.is_mutable else self._answer(func, args)
            if answer is not None:
                self._answers[out] = answer
            elif out in self._answers:  # it has been written to
                del self._answers[out]
        return out

    def _answer(self, func: Any, args: Sequence[Any]) -> bool | None:
        """What all truths that an operation gives are; None where it is not known."""
        if func in _NEVER:
            return False
        if func in _EQUAL:
            one, other = args[:2]
            if one is other:
                return _EQUAL[func]
            return not _EQUAL[func] if isinstance(other, float) and not math.isfinite(other) else None
        packet, first = func.overloadpacket, args[0] if args else None
        known = self._answers.get(first) if isinstance(first, Tensor) else None
        if known is None:
            return None
        if packet in _KEEPS:
            return known
        if packet in _NOT:
            return not known
        second = self._answers.get(args[1]) if packet in _BOTH and isinstance(args[1], Tensor) else None
        return None if second is None else _BOTH[packet]((known, second))

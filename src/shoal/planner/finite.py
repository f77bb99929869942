"""What a model asks of its numbers, and a backward of torch's: whether they are finite, and whether a mask of padding
is of ones alone. Where there are none they all are finite, as in training that goes well, and a mask is what it is made
as, or as in the row that is given."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import transformer as layers
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from shoal.module.known_calls import NEW, KnownCalls
from shoal.planner.made_up import patched

_aten = torch.ops.aten
_READ = _aten._local_scalar_dense.default
_NEVER = {_aten.isnan.default, _aten.isinf.default, _aten.isposinf.default, _aten.isneginf.default}
_EQUAL = {_aten.eq.Tensor: True, _aten.eq.Scalar: True, _aten.ne.Tensor: False, _aten.ne.Scalar: False}
"""Comparisons, and whether they are true of what is equal: a finite number is itself, and none of the others."""
_ONES = {_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default}
_SEEN = {_aten.detach, _aten.alias, _aten.view, _aten.slice, _aten.expand, _aten.unsqueeze}
_KEEPS = {*_SEEN, _aten.any, _aten.all, _aten._to_copy, _aten.clone}
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

    def ones(self, tensor: Tensor) -> None:
        """Notes that all of a tensor is 1, or True."""
        self._answers[tensor] = True

    def are_ones(self, tensor: Any) -> bool:
        """Whether all of a tensor is known to be 1, or True."""
        return isinstance(tensor, Tensor) and self._answers.get(tensor) is True

    def _noted(self, func: Any, args: Sequence[Any], out: Any) -> Any:
        """Returns `out`, what an operation gave, of which it keeps the truth that is known."""
        if out is NEW or not isinstance(out, Tensor):
            return out
        if self._answers and func._schema.is_mutable:
            self._forget(out)
        elif (answer := self._answer(func, args)) is not None:
            self._answers[out] = answer
        return out

    def _forget(self, written: Tensor) -> None:
        """Forgets what was known of a tensor that is written to, and of those in its memory."""
        place = written.untyped_storage()._cdata
        for each in [each for each in self._answers if each.untyped_storage()._cdata == place]:
            del self._answers[each]

    def _answer(self, func: Any, args: Sequence[Any]) -> bool | None:
        """What all truths that an operation gives are; None where it is not known."""
        if func in _NEVER or func in _ONES:
            return func in _ONES
        if func in _EQUAL:
            one, other = args[:2]
            if one is other:
                return _EQUAL[func]
            if isinstance(other, float) and not math.isfinite(other):
                return not _EQUAL[func]
            return _EQUAL[func] if self.are_ones(one) and type(other) in (int, float, bool) and other == 1 else None
        packet, first = func.overloadpacket, args[0] if args else None
        known = self._answers.get(first) if isinstance(first, Tensor) else None
        if known is None:
            return None
        if packet in _KEEPS:
            return known
        if packet in _NOT and isinstance(first, Tensor) and first.dtype == torch.bool:
            return not known
        second = self._answers.get(args[1]) if packet in _BOTH and isinstance(args[1], Tensor) else None
        return None if second is None else _BOTH[packet]((known, second))


@contextmanager
def masks_seen(calls: FiniteCalls) -> Iterator[None]:
    """Has transformers leave out inside the context, as it does for real ones, masks that are known to be of ones; it
    makes all those that are fake."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        if masks is not None and hasattr(masks, "is_tracing") and hasattr(masks, "fast_all"):
            traced, summed = masks.is_tracing, masks.fast_all
            known = calls.are_ones
            stack.enter_context(patched(masks, "is_tracing", lambda mask=None: not known(mask) and traced(mask)))
            stack.enter_context(patched(masks, "fast_all", lambda mask: known(mask) or summed(mask)))
        yield


@contextmanager
def causal_seen() -> Iterator[None]:
    """Has `nn.Transformer` know inside the context, without a look at values, that a mask which its own function has
    made is causal."""
    generate, detect, made = (
        layers._generate_square_subsequent_mask,
        layers._detect_is_causal_mask,
        WeakIdKeyDictionary(),
    )

    def generated(size: int, *args: Any, **kwargs: Any) -> Tensor:
        mask = generate(size, *args, **kwargs)
        made[mask] = None
        return mask

    def detected(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is None and mask is not None and mask in made:
            return size is None or mask.shape[-2] == size
        return bool(detect(mask, is_causal, size))

    with (
        patched(layers, "_generate_square_subsequent_mask", generated),
        patched(layers, "_detect_is_causal_mask", detected),
    ):
        yield


def note_ones(calls: FiniteCalls, batch: Mapping[str, Tensor], sample: Mapping[str, Tensor]) -> None:
    """Notes which tensors of whole numbers or truths of a `batch` are of ones alone, by the row `sample` of it."""
    with _disable_current_modes():
        ones = [key for key, each in sample.items() if not each.is_floating_point() and bool((each == 1).all())]
    for key in ones:
        if sample[key].dim():
            calls.ones(batch[key])

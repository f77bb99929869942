"""How kernels lay out what they give where fake tensors say otherwise: a view of it may be a copy of the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
CONTIGUOUS = (
    _aten.native_layer_norm_backward.default,
    _aten._log_softmax_backward_data.default,
    _aten.glu_backward.default,
    _aten.log_sigmoid_forward.default,
)
SUGGESTED = {
    _aten.native_batch_norm.default: 0,
    _aten.native_batch_norm_backward.default: 1,
    _aten.reflection_pad2d_backward.default: 1,
    _aten.roll.default: 0,
}
"""The place of the input by which a result has its channels last, or is contiguous."""
AS_THE_GRADIENT = (
    _aten.elu_backward.default,
    _aten.hardsigmoid_backward.default,
    _aten.hardswish_backward.default,
    _aten.hardtanh_backward.default,
    _aten.softplus_backward.default,
)
"""Of activations whose fake gradients lie as the input does."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dims."""
_KNOWN = {*CONTIGUOUS, *SUGGESTED, *AS_THE_GRADIENT}


def laid_out(func: Any, args: Any, out: Any) -> Any:
    """`out`, what `func` gave for fake `args`, with the strides of a real result, the first one if it has several."""
    if func not in _KNOWN:
        return out
    several = isinstance(out, tuple)
    first = out[0] if several else out
    if first is None:  # a gradient that nobody asked for
        return out
    found = _first(func, args, first)
    return (found, *out[1:]) if several else found


def _first(func: Any, args: Any, fake: Tensor) -> Tensor:
    """`fake`, a result of `func`, as a real one."""
    if func in AS_THE_GRADIENT:
        found = torch.empty_like(args[0], dtype=fake.dtype)  # as the gradient, if that is dense
        same = found.shape == fake.shape and found.stride() == args[0].stride() != fake.stride()
        return found if same else fake
    place = SUGGESTED.get(func)
    return fake.contiguous(memory_format=torch.contiguous_format if place is None else _suggested(args[place]))


def _suggested(given: Tensor) -> torch.memory_format:
    """The format that kernels take `given` to have; one that is contiguous as well does not have its channels last."""
    last = CHANNELS_LAST.get(given.dim())
    if last is None or given.is_contiguous() or not given.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last

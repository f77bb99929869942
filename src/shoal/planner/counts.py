"""What operations compute and touch, counted as they are called: products by torch's formulas, attention also on a CPU
and causal masks by half, everything else by the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from shoal.module.selective import OPERATIONS
from shoal.planner.fusion import Fusion

_aten = torch.ops.aten
ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}
"""Fused attention."""
_GROUPED = _aten._grouped_mm
_FREE = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "empty", "empty_like", "new_empty", "empty_strided"}
"""Operations that compute nothing, beside views."""


class Counts(TorchDispatchMode):
    """Counts what operations compute and touch."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.clear()

    def clear(self) -> None:
        self.products = self.convolutions = self.attention = self.touched = self.last = 0.0
        self.calls = self.operands = self.multiplied = self._read = 0
        self.results = dict.fromkeys(OPERATIONS, 0)
        self._fusion = Fusion()

    @property
    def all(self) -> tuple[float, ...]:
        """The counts in the order of the fields of Seen."""
        sums = self.products, self.convolutions, self.attention, self.touched, self.calls
        results = (self.results[name] for name in ("matmul", "attention", "convolution"))
        ends = self.operands, self.last, self.multiplied, self._fusion.touched, self._fusion.kernels
        return (*sums, *results, *ends)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if func.is_view or packet.__name__ in _FREE:
            self._fusion.passed((args, kwargs), out)
            return out
        self.calls += 1
        if packet in ATTENTION:
            causal = _argument(func, args, kwargs, "is_causal")
            self.attention += sdpa_flop_count(*(each.shape for each in args[:3])) / (2 if causal else 1)
        elif packet in flop_registry or packet is _GROUPED:
            work = _grouped(*args[:2]) if packet is _GROUPED else flop_registry[packet](*args, **kwargs, out_val=out)
            self.products += work
            self.convolutions += work * (func in OPERATIONS["convolution"])
            self.multiplied += 1
            self.last = work + (0.0 if self.kept() else self.last)
        else:
            given = () if packet is _aten.embedding else (args, kwargs)
            self.touched += _nbytes((given, out))
            self._fusion.fused(given, (args, kwargs), out)
            return out
        for name, own in OPERATIONS.items():
            self.results[name] += _nbytes(out) * (func in own)
        self.operands += _nbytes((args, kwargs, out))
        self._fusion.multiplied((args, kwargs), out)
        return out

    def kept(self) -> bool:
        """Whether backward has kept something since it was last asked."""
        new, self._read = self.log[self._read :], len(self.log)
        return any(what == "saved" for what, _ in new)


def _grouped(one: Tensor, other: Tensor) -> float:
    """Operations of a product by groups: each row of `one` with the matrix of its group, of each pair of matrices, or
    rows of both that are of one group summed over. Torch has no formula for it."""
    groups = one.shape[0] if one.dim() == 3 and other.dim() == 2 else 1
    return 2.0 * one.numel() * other.shape[-1] / groups


def _nbytes(values: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(values) if isinstance(each, Tensor))


def _argument(func: Any, args: Sequence[Any], kwargs: Any, name: str) -> Any:
    for place, each in enumerate(func._schema.arguments):
        if each.name == name:
            return args[place] if place < len(args) else kwargs.get(name, each.default_value)
    return None

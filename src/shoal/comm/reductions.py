"""The reductions of every transport: how two tensors are combined, and how an average is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import UserError

COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
"""Elementwise operations in the tensors' dtype. "avg" is a sum that `finish` divides by the number of ranks."""

TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
"""The names of reductions in torch.distributed."""


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raises UserError for an unknown `op`, and for the average of integers, which has no exact value."""
    if op not in COMBINE:
        raise UserError(f"there is no reduction {op!r}; take one of {', '.join(COMBINE)}")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise UserError(
            f"the average of {dtype} is not defined: reduce with 'sum', or convert the tensor to a floating dtype"
        )


def combined(parts: Sequence[Tensor], op: str) -> Tensor:
    """The combination of the tensors of two ranks or more, in their order."""
    total = COMBINE[op](parts[0], parts[1])
    for part in parts[2:]:
        COMBINE[op](total, part, out=total)
    return total


def finish(total: Tensor, op: str, size: int) -> Tensor:
    """Turns the combination of the tensors of all `size` ranks into the result, in place."""
    return total.div_(size) if op == "avg" else total

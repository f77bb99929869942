"""The reductions of every transport: what combines two tensors, and what an average does at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.errors import UserError

COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
"""Elementwise, in the tensors' dtype. "avg" is a sum that `finish` divides by the number of ranks."""


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raises UserError for an unknown `op`, and for the average of integers, which has no exact value."""
    if op not in COMBINE:
        raise UserError(f"there is no reduction {op!r}; take one of {', '.join(COMBINE)}")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise UserError(f"the average of {dtype} is not defined: reduce with 'sum', or convert the tensor to a floating dtype")


def finish(total: Tensor, op: str, size: int) -> Tensor:
    """Turns the combined tensors of all `size` ranks into the result, in place."""
    return total.div_(size) if op == "avg" else total

"""The dtypes and operations that native/reduce.c knows, by their indices in its tables."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.reductions import check_reduction

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
OPS = ("sum", "min", "max", "product", "avg")
REDUCTIONS = {
    (dtype, op): (i, j)
    for i, dtype in enumerate(DTYPES)
    for j, op in enumerate(OPS)
    if dtype.is_floating_point or op != "avg"
}
_BOOL = {"sum": "max", "max": "max", "min": "min", "product": "min"}  # as bytes; torch's True + True is True


def reduction(flat: Tensor, op: str) -> tuple[Tensor, int, int]:
    """Returns `flat` as numbers that C can reduce, and the indices of its dtype and of `op` in C's tables."""
    assert flat.is_contiguous()
    if (codes := REDUCTIONS.get((flat.dtype, op))) is not None:
        return flat, *codes
    check_reduction(op, flat.dtype)
    if flat.dtype == torch.bool:
        return reduction(flat.view(torch.uint8), _BOOL[op])
    if flat.is_complex() and op in ("sum", "avg"):
        return reduction(torch.view_as_real(flat).view(-1), op)
    raise TypeError(f"{op} of {flat.dtype} is not possible in shared memory; dtypes: {', '.join(map(str, DTYPES))}")

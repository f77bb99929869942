"""Sums of sparse tensors: every rank gets the others' entries and adds them in rank order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sum_sparse(transport: Any, tensor: Tensor, op: str) -> None:
    """Replaces the sparse COO `tensor` by the sum over the ranks, coalesced.

    Ranks have equal shapes and any entries.
    """
    if op != "sum" or tensor.device.type != "cpu":
        raise NotImplementedError(f"sparse tensors can be summed on the CPU, not reduced by {op} on {tensor.device}")
    mine = tensor.detach().coalesce()
    counts = torch.empty(transport.size, dtype=torch.int64)
    transport.all_gather(counts, torch.tensor([mine.indices().size(1)]))
    most = int(counts.max())
    indices = _gathered(transport, mine.indices().t(), most)
    values = _gathered(transport, mine.values(), most)
    here = [slice(0, int(count)) for count in counts]
    entries = torch.cat([rows[part] for rows, part in zip(indices, here, strict=True)]).t()
    total = torch.cat([rows[part] for rows, part in zip(values, here, strict=True)])
    with torch.no_grad():  # `tensor.detach()` would get entries of its own
        tensor.copy_(torch.sparse_coo_tensor(entries, total, tensor.shape, check_invariants=False).coalesce())


def _gathered(transport: Any, rows: Tensor, most: int) -> Tensor:
    """Returns each rank's `rows`, [size, most, ...], padded with zeros."""
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: rows.size(0)] = rows
    out = rows.new_empty((transport.size, *padded.shape))
    transport.all_gather(out.view(-1), padded.view(-1))
    return out

"""Gradients that are rows, as `nn.Embedding(sparse=True)` gives them: only rows travel, or the whole where that is less."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm import Group


def clear(dense: Tensor, rows: Tensor | None) -> None:
    """Zeroes the rows that were written last; all of them where `rows` is None."""
    if rows is None:
        dense.zero_()
    else:
        dense.index_fill_(0, rows.to(dense.device), 0)


def add_rows(dense: Tensor, gradient: Tensor, rows: Tensor | None) -> Tensor | None:
    """Adds the sparse `gradient` to `dense`; returns the rows written so far, with repetition."""
    indices, values = gradient._indices()[0], gradient._values()
    dense.index_add_(0, indices, values.to(dense.dtype))
    return None if rows is None else torch.cat([rows.to(indices.device), indices])


def sum_rows(dense: Tensor, rows: Tensor | None, group: Group, purpose: str) -> Tensor | None:
    """Replaces `dense`, zero outside `rows`, by its sum over `group`; returns the rows of the sum (sorted), None for all.

    The ranks tell how many rows they have. Where gathering them takes fewer bytes than an all-reduce of everything, they are gathered
    and added in rank order, so that every rank gets the same bits; a rank whose `rows` are None makes it an all-reduce.
    """
    mine = None if rows is None else rows.unique()
    if group.size == 1:
        return mine
    count = torch.tensor([dense.shape[0] + 1 if mine is None else mine.numel()], device=dense.device)
    counts = group.all_gather(count.new_empty(group.size), count, purpose=purpose).tolist()
    most, width = max(counts), dense[0].numel()
    if most == 0:
        return mine
    gathered = (group.size - 1) * most * (width * dense.element_size() + 8)
    reduced = 2 * (group.size - 1) * dense.nbytes // group.size
    if mine is None or most > dense.shape[0] or gathered >= reduced:
        group.all_reduce(dense, purpose=purpose)
        return None
    padded, values = mine.new_zeros(most), dense.new_zeros(most, width)
    padded[: mine.numel()] = mine
    values[: mine.numel()] = dense[mine].view(-1, width)
    all_rows = group.all_gather(padded.new_empty(group.size * most), padded, purpose=purpose).view(group.size, most)
    all_values = group.all_gather(values.new_empty(group.size * most, width), values, purpose=purpose).view(
        group.size, most, width
    )
    clear(dense, mine)
    for found, value, number in zip(all_rows, all_values, counts, strict=True):
        dense.index_add_(0, found[:number], value[:number].view(-1, *dense.shape[1:]))
    return torch.cat([found[:number] for found, number in zip(all_rows, counts, strict=True)]).unique()

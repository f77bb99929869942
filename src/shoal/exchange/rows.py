"""Gradients of embeddings as rows.

Those of `nn.Embedding(sparse=True)` travel as rows, or as a whole where that is less; those of any other embedding are
added as rows to the sum of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.comm import Group
from shoal.exchange.hooks import is_hooked

ByRows = tuple[nn.Embedding, Tensor]
"""An embedding and its weight, kept since reading `embedding.weight` would gather a sharded weight."""


def row_by_row(module: nn.Module, compiled: Collection[nn.Module], device: torch.device) -> list[ByRows]:
    """Returns the embeddings whose gradients can be taken as rows although they are given whole. CPU only.

    Filling a vocabulary's gradient with zeros for each microbatch takes longer there than all computation on its
    tokens. Excluded are embeddings inside `compiled` blocks, which would be traced; tied ones, whose other gradient is
    whole; and (see as_rows) those whose weight has users' hooks, which may expect a whole gradient.
    """
    if device.type != "cpu":
        return []
    inside = {id(part) for block in compiled for part in block.modules()}
    owners = Counter(id(parameter) for part in module.modules() for parameter in part._parameters.values())
    return [
        (part, part.weight)
        for part in module.modules()
        if isinstance(part, nn.Embedding)
        and type(part).forward is nn.Embedding.forward
        and not (part.sparse or part.scale_grad_by_freq or part.max_norm is not None or id(part) in inside)
        and owners[id(part.weight)] == 1
    ]


@contextmanager
def as_rows(embeddings: Sequence[ByRows]) -> Iterator[None]:
    """Gives `embeddings` gradients as rows inside the block, except where a weight is frozen or has hooks by now: an
    adapter on a frozen embedding looks tokens up in a weight of its own, as that embedding says."""
    bare = [embedding for embedding, weight in embeddings if weight.requires_grad and not is_hooked(weight)]
    for embedding in bare:
        embedding.sparse = True
    try:
        yield
    finally:
        for embedding in bare:
            embedding.sparse = False


def put(dense: Tensor, gradient: Tensor, adds: bool) -> None:
    """Writes `gradient`, whole or as rows, to `dense`, or adds it if `adds`. Equal rows are summed first."""
    if gradient.is_sparse:
        if not adds:
            dense.zero_()
        add_rows(dense, gradient.coalesce(), None)
    elif adds:
        dense.add_(gradient)
    else:
        dense.copy_(gradient)


def keep(rows: dict[str, Tensor | None], name: str, view: Tensor, gradient: Tensor, adds: bool) -> None:
    """Writes a gradient to `view`, or adds it if `adds`. One that is in `rows` is always added, and its rows are
    noted."""
    if name not in rows:
        put(view, gradient, adds)
    elif gradient.is_sparse:
        rows[name] = add_rows(view, gradient, rows[name])
    else:  # tied to something dense: rows would be no shorter
        rows[name] = None
        view.add_(gradient)


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
    """Replaces `dense`, zero outside `rows`, by its sum over `group`; returns the sum's sorted rows, None for all.

    The ranks tell how many rows they have. Where gathering them takes fewer bytes than an all-reduce of everything,
    they are gathered and added in rank order, so that every rank gets the same bits; else there is a second one, of one
    number a row, for which of them some rank has. A rank whose `rows` are None makes it an all-reduce of all rows.
    """
    mine = None if rows is None else rows.unique()
    if group.size == 1:
        return mine
    count = torch.full((1,), dense.shape[0] + 1 if mine is None else mine.numel(), device=dense.device)
    counts = group.all_gather(count.new_empty(group.size), count, purpose=purpose).tolist()
    most, width = max(counts), dense[0].numel()
    if most == 0:
        return mine
    gathered = (group.size - 1) * most * (width * dense.element_size() + 8)
    reduced = 2 * (group.size - 1) * dense.nbytes // group.size
    if mine is None or most > dense.shape[0] or gathered >= reduced:
        group.all_reduce(dense, purpose=purpose)
        if mine is None or most > dense.shape[0]:
            return None
        ranks = dense.new_zeros(dense.shape[0]).index_fill_(0, mine.to(dense.device), 1)
        return group.all_reduce(ranks, purpose=purpose).nonzero().flatten()
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

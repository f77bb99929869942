"""Embeddings whose table lies on parameter servers: a forward pulls the rows of its batch, a backward leaves their
gradients.

A batch of ids 7 3 7 pulls rows 3 and 7, which stand in for the table: the embedding of 1 0 1 in these two. So repeated
ids are pulled once. Their gradients are summed as an engine sums those of a table: of sparse ones each is added by
itself, of others those of one forward are added up first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.server.client import Client
from shoal.server.served_table import Pushed
from shoal.server.table import summed

Embedding = nn.Embedding | nn.EmbeddingBag


class RowsInUse:
    """The rows that forwards have pulled since `begin`, with their gradients, through `client`. A module is built
    before that is there."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self._taken: list[tuple[str, Tensor, Tensor, bool]] = []

    def keep_compilers_out(self) -> None:
        """Has forwards that are compiled pull rows as they are; a client's sessions are nothing to trace."""
        self.take = torch.compiler.disable(self.take)  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forgets what was pulled."""
        self._taken.clear()

    def take(self, table: str, ids: Tensor, sparse: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows of a table [n, width], which autograd reaches; where each of `ids` is among them (int64, of its
        shape); and the numbers of the rows [n]. `sparse`: its gradients are."""
        assert self.client is not None, "rows are pulled before there is a client"
        once, back = torch.unique(ids.detach().to("cpu", torch.int64), return_inverse=True)
        values, _ = self.client.pull_each(table, once)
        values = values.to(ids.device)
        if torch.is_grad_enabled():
            self._taken.append((table, once, values.requires_grad_(), sparse))
        return values, back.to(ids.device), once

    def gradients(self, factor: float) -> dict[str, Pushed]:
        """Returns the rows of each table that a backward has reached, with `factor` times their gradients."""
        found: dict[str, list[Pushed]] = {}
        for table, once, values, sparse in self._taken:
            if (gradient := values.grad) is not None:
                gradient = gradient if sparse or not gradient.is_sparse else gradient.coalesce()
                rows = once[gradient._indices()[0].cpu()] if gradient.is_sparse else once
                part = rows, gradient._values() if gradient.is_sparse else gradient
                found.setdefault(table, []).append(part)
        return {table: _together(parts, factor) for table, parts in found.items()}


def _together(parts: list[Pushed], factor: float) -> Pushed:
    rows, values = (torch.cat(each) for each in zip(*parts, strict=True))
    rows, values = summed(rows.to(values.device), values)
    return rows.cpu(), values.mul_(factor)


class ServedEmbedding(nn.Module):
    """Stands in for the embedding or bag `like`, whose weight is the `table` of parameter servers, and computes what it
    computes. `rows`: None for a module that runs no forward. dtype: of what it returns."""

    def __init__(self, table: str, like: Embedding, rows: RowsInUse | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._table, self._rows, self._dtype, self._sparse = table, rows, dtype, like.sparse
        self.num_embeddings, self.embedding_dim = like.num_embeddings, like.embedding_dim
        self.padding_idx, self._by_frequency = like.padding_idx, like.scale_grad_by_freq
        self.mode = like.mode if isinstance(like, nn.EmbeddingBag) else ""
        self._last_offset = isinstance(like, nn.EmbeddingBag) and like.include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Computes the embedding of `input` (integers), as torch.nn.Embedding and EmbeddingBag do."""
        assert self._rows is not None
        values, index, once = self._rows.take(self._table, input, self._sparse)
        padding = None
        if self.padding_idx is not None:
            at = int(torch.searchsorted(once, self.padding_idx))
            padding = at if at < len(once) and int(once[at]) == self.padding_idx else None
        if not self.mode:
            each = F.embedding(
                index, values, padding, scale_grad_by_freq=self._by_frequency, sparse=not self._by_frequency
            )
            return each.to(self._dtype)
        return F.embedding_bag(
            index,
            values.to(self._dtype),
            offsets,
            scale_grad_by_freq=self._by_frequency,
            mode=self.mode,
            sparse=not self._by_frequency and self.mode != "max",
            per_sample_weights=per_sample_weights,
            include_last_offset=self._last_offset,
            padding_idx=padding,
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rows of {self._table} on parameter servers"


def embeddings_of(module: nn.Module, named: Collection[str] | None) -> dict[str, Embedding]:
    """Returns the embeddings of `module` that are served by rows, by the name of their weight: those that are `named`;
    None: all of sparse gradients.

    Raises UserError for one whose rows alone do not say what it computes, and for a name that is none.
    """
    weights = {id(each): name for name, each in module.named_parameters()}
    found: dict[str, Embedding] = {}
    for each in module.modules():
        if isinstance(each, Embedding) and each._parameters.get("weight") is not None:
            name = weights[id(each._parameters["weight"])]
            if each.sparse if named is None else name in named:
                found[name] = each
    for name in named or ():
        if name not in found:
            parts = sorted(path for path, each in module.named_modules() if isinstance(each, Embedding))
            known = ", ".join(f"{path}.weight" for path in parts) or "none"
            raise UserError(f"server.tables: {name!r} is no weight of an embedding. The model has {known}")
    for name, each in found.items():
        if why := _why_not(module, each):
            raise UserError(
                f"{name} cannot be served by rows: {why}. Leave it out of server.tables, where [] serves none by rows"
            )
    return found


def _why_not(module: nn.Module, each: Embedding) -> str:
    weight, kind = each._parameters["weight"], type(each)
    assert weight is not None
    owners = [part for part in module.modules() if any(own is weight for own in part._parameters.values())]
    others = [part for part in owners if part is not each]
    if others:
        return f"it is tied to the weight of a {type(others[0]).__name__}, which reads all of it"
    if kind.forward not in (nn.Embedding.forward, nn.EmbeddingBag.forward):
        return f"its class {kind.__name__} computes otherwise than torch's embedding"
    if each.max_norm is not None:
        return "max_norm has a forward change its rows"
    if not weight.requires_grad:
        return "it is not trained"
    return "" if weight.is_floating_point() else "it holds whole numbers"


def without_tables(
    factory: Callable[[], nn.Module], tables: Collection[str], rows: RowsInUse | None, dtype: torch.dtype
) -> Callable[[], nn.Module]:
    """Returns a factory of the same model, in which embeddings stand whose weights, `tables` by name, it has not."""

    def made() -> nn.Module:
        module = factory()
        stand_ins = {
            id(each): ServedEmbedding(name, each, rows, dtype) for name, each in embeddings_of(module, tables).items()
        }
        for owner in list(module.modules()):
            for leaf, child in owner._modules.items():
                if id(child) in stand_ins:
                    owner._modules[leaf] = stand_ins[id(child)]
        return module

    return made

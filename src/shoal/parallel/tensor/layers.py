"""Layers that keep a part of their weight. A layer becomes one by its class (`become`), so it remains an instance of
its original class.

    Column      y_r = x W_r^T                   the rows of W are cut: of heads, of a wide layer
    Row         y = sum over r of x_r W_r^T     the columns of W are cut; the bias is added once
    Gathered    as Column, and all ranks get the whole y
    Split       as Row, for an x that all ranks have whole
    Vocabulary  the rows of an embedding are cut: each rank looks up its own, zeros for the others
    Tokens      the output for a sequence is cut to this rank's tokens (sequence parallel)
    Head        as Column, and the logits stay cut
    Attention   sets the number of heads of this rank while it runs
    Inside      a layer between Column and Row whose weights all ranks have: their gradients are summed
    Experts     a mixture's matrices, each cut; its input enters the region, its output leaves it

The parameter of a cut layer has the shape of W_r; no other code needs to know that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.tensor.likelihood import here_or_elsewhere
from shoal.parallel.tensor.logits import ShardedLogits
from shoal.parallel.tensor.region import Region
from shoal.parallel.tensor.spans import Span


class Cut(nn.Module):
    """Base of all cut layers: `_region` is set by `become`."""

    _region: Region

    def _product(self, x: Tensor) -> Tensor:
        """Returns the product of the original layer with `x`, after `x` has entered the region."""
        if self._region.overlaps and isinstance(self, nn.Linear):
            return self._region.multiply(x, self.weight, self.bias)
        return super().forward(self._region.enter(x))


class Column(Cut):
    """A linear layer with some rows of the weight.

    `_spans`: the rows of the whole weight that this rank has, adjacent in its own. The output of rows of a head that
    neighbouring ranks share is gathered from them.
    """

    _spans: Sequence[Span]

    def forward(self, x: Tensor) -> Tensor:
        y = self._product(x)
        if all(span.sharers == 1 for span in self._spans):
            return y
        parts = y.split([span.length for span in self._spans], dim=-1)
        return torch.cat(
            [
                part if span.sharers == 1 else self._region.share(part, span.sharers)
                for part, span in zip(parts, self._spans, strict=True)
            ],
            dim=-1,
        )


class Row(Cut):
    """A linear layer with some columns of the weight; outputs are summed over the ranks, then the bias is added.

    `_inputs_first`: the weight is [in, out], as in Conv1D of transformers.
    """

    weight: Tensor
    bias: Tensor | None
    _inputs_first: bool

    def forward(self, x: Tensor) -> Tensor:
        if self._region.overlaps and not self._inputs_first:
            y = self._region.multiply_and_leave(x, self.weight)
        else:  # a plain product here, so that compiled blocks can compile it
            y = self._region.leave(x @ self.weight if self._inputs_first else F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class Gathered(Cut):
    """A linear layer with some rows of the weight, whose output is gathered; `_lengths`: the number of rows of each
    rank."""

    _lengths: Sequence[int]

    def forward(self, x: Tensor) -> Tensor:
        return self._region.whole(self._product(x), self._lengths)


class Split(Row):
    """A `Row` whose input is whole on all ranks; `_start`: the first column of the weight that this rank has."""

    _start: int

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(
            self._region.enter(x).narrow(-1, self._start, self.weight.shape[0 if self._inputs_first else 1])
        )


class Vocabulary(Cut):
    """An embedding with `_rows` rows; `_start`: the id of the first, `_whole`: the number of rows over all ranks, which
    `num_embeddings` stays: models ask for it."""

    _rows: int
    _start: int
    _whole: int

    def forward(self, ids: Tensor) -> Tensor:
        here, elsewhere = here_or_elsewhere(ids, self._start, self._rows, self._whole, "a token")
        rows = super().forward(here)
        return self._region.leave_first(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class Tokens(Cut):
    """A layer whose output [.., T, D] is cut to this rank's tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._region.own_tokens(super().forward(*args, **kwargs))


class Head(Cut):
    """A linear layer with some rows of the vocabulary, which gives `ShardedLogits`; `_lengths`: the rows of each
    rank."""

    _lengths: Sequence[int]

    def forward(self, x: Tensor) -> ShardedLogits:
        return ShardedLogits(self._product(x), self._lengths, self._region)


class Inside(Cut):
    """A layer whose weights all ranks have but use on different activations: each use sums the weights' gradients."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self._parameters
        entered = {name: value if value is None else self._region.enter_alone(value) for name, value in own.items()}
        self.__dict__["_parameters"] = entered
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = own


class Attention(Cut):
    """An attention module that has `_heads` heads of queries on this rank."""

    _heads: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._region.attention(self._heads):
            return super().forward(*args, **kwargs)


class Experts(Cut):
    """Experts whose matrices are cut inside: rows [N, D] and their routing enter the region, the summed output leaves
    it."""

    def forward(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, *meanwhile: Any) -> Tensor:
        entered = [self._region.enter_rows(each) for each in (x_ND, index_NK, weights_NK)]
        return self._region.leave_rows(super().forward(*entered, *meanwhile))


@cache
def _class_of(kind: Any, of: Any) -> Any:
    return type(f"{kind.__name__}{of.__name__}", (kind, of), {})


def become(module: nn.Module, kind: Any, **attributes: Any) -> None:
    """Changes the class of `module` to one that derives from `kind`, a class above, and from the class that it had.

    `attributes` are set on the module.
    """
    of: Any = type(module)
    module.__class__ = _class_of(kind, of)
    for name, value in attributes.items():
        setattr(module, name, value)

"""Layers that keep a part of their weight. A layer becomes one by its class (`become`), so it stays what it was for everybody else.

    Column      y_r = x W_r^T                   the rows of W are cut: of heads, of a wide layer
    Row         y = sum over r of x_r W_r^T     the columns of W are cut; the bias is added once
    Gathered    as Column, and all ranks get y whole
    Split       as Row, of an x that all ranks have whole
    Vocabulary  the rows of an embedding are cut: each rank looks up its own, zeros for the others
    Tokens      what it gives of a sequence is cut to this rank's tokens (sequence parallel)
    Head        as Column, and the logits stay cut
    Attention   knows how many heads are here
    Inside      a layer whose weights all ranks have, between Column and Row: their gradients are summed
    Experts     a mixture's matrices, all cut inside; what goes in enters, what comes out leaves

A rank's W_r has its own shape; nobody else has to know.
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
    """What all of them have: `_region`, set by `become`."""

    _region: Region

    def _product(self, x: Tensor) -> Tensor:
        """The layer's own, of what enters."""
        if self._region.overlaps and isinstance(self, nn.Linear):
            return self._region.multiply(x, self.weight, self.bias)
        return super().forward(self._region.enter(x))


class Column(Cut):
    """`_spans`: the rows of the whole that this rank has, one after the other. Those that it shares with neighbours are put together behind the product."""

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
    """`_inputs_first`: the weight is [in, out], as Conv1D of transformers has it."""

    weight: Tensor
    bias: Tensor | None
    _inputs_first: bool

    def forward(self, x: Tensor) -> Tensor:
        if self._region.overlaps and not self._inputs_first:
            y = self._region.multiply_and_leave(x, self.weight)
        else:  # the product is not the region's: compiled blocks compile it
            y = self._region.leave(x @ self.weight if self._inputs_first else F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class Gathered(Cut):
    """`_lengths`: how many of its rows each rank has."""

    _lengths: Sequence[int]

    def forward(self, x: Tensor) -> Tensor:
        return self._region.whole(self._product(x), self._lengths)


class Split(Row):
    """`_start`: its first column."""

    _start: int

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self._region.enter(x).narrow(-1, self._start, self.weight.shape[0 if self._inputs_first else 1]))


class Vocabulary(Cut):
    """`_start`: the id of its first row, `_whole`: how many rows all ranks have."""

    num_embeddings: int
    _start: int
    _whole: int

    def forward(self, ids: Tensor) -> Tensor:
        here, elsewhere = here_or_elsewhere(ids, self._start, self.num_embeddings, self._whole, "a token")
        rows = super().forward(here)
        return self._region.leave_first(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class Tokens(Cut):
    """What it gives of a sequence is cut to this rank's tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._region.own_tokens(super().forward(*args, **kwargs))


class Head(Cut):
    """`_lengths`: how many rows of the vocabulary each rank has."""

    _lengths: Sequence[int]

    def forward(self, x: Tensor) -> ShardedLogits:
        return ShardedLogits(self._product(x), self._lengths, self._region)


class Inside(Cut):
    """Its weights enter, each time that they are used."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self._parameters
        entered = {name: value if value is None else self._region.enter_alone(value) for name, value in own.items()}
        self.__dict__["_parameters"] = entered
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = own


class Attention(Cut):
    """`_heads`: of queries, on this rank."""

    _heads: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._region.attention(self._heads):
            return super().forward(*args, **kwargs)


class Experts(Cut):
    def forward(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor, *meanwhile: Any) -> Tensor:
        entered = [self._region.enter_rows(each) for each in (x_ND, index_NK, weights_NK)]
        return self._region.leave_rows(super().forward(*entered, *meanwhile))


@cache
def _class_of(kind: Any, of: Any) -> Any:
    return type(f"{kind.__name__}{of.__name__}", (kind, of), {})


def become(module: nn.Module, kind: Any, **attributes: Any) -> None:
    """Makes `module` one of `kind`, a class above, which calls the forward that it had."""
    of: Any = type(module)
    module.__class__ = _class_of(kind, of)
    for name, value in attributes.items():
        setattr(module, name, value)

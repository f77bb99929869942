"""What modules become whose cut was found from their graph, each by its class (see `tensor.layers.become`).

Enters     a product with some rows of its weight: its input enters the region
Leaves     a product with some columns of its weight: its output leaves the region, then the bias is added
Entered    its output, which every rank has, enters the region: ranks use it for different things
Uses       some of its parameters, which every rank has, are used on different activations: their gradients are
           summed
Takes      arguments that every rank has, of which it takes its part
Buffers    buffers that every rank has, of which it uses its part; what it writes to them is shared
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only

from shoal.comm.functional import reduce_from
from shoal.parallel.tensor.graph.trace import tensors_in
from shoal.parallel.tensor.layers import Cut
from shoal.parallel.tensor.piece import Piece

Stretches = Sequence[tuple[int, int]]


class Enters(Cut):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self._region.enter(x), *args, **kwargs)


class Leaves(Cut):
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        bias = self.bias
        if type(self).__name__.endswith("Conv1D") and not isinstance(self, _ConvNd):  # adds the bias in the product
            return self._region.leave(x @ self.weight) + bias
        with_parameters = self._parameters
        self.__dict__["_parameters"] = {**with_parameters, "bias": None}
        try:
            y = self._region.leave(super().forward(x, *args, **kwargs))
        finally:
            self.__dict__["_parameters"] = with_parameters
        if bias is None:
            return y
        return y + (bias.view(-1, *[1] * (self.weight.dim() - 2)) if isinstance(self, _ConvNd) else bias)


class Entered(Cut):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._region.enter(super().forward(*args, **kwargs))


class Uses(Cut):
    """`_shared`: the names of the parameters."""

    _shared: frozenset[str]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self._parameters
        self.__dict__["_parameters"] = {
            name: self._region.enter_alone(value) if name in self._shared and value is not None else value
            for name, value in own.items()
        }
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = own


class Takes(Cut):
    """`_places`: the part of each tensor among the arguments, by its place."""

    _places: Mapping[int, Piece]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given, region = tensors_in((args, kwargs)), self._region
        parts = {id(given[at]): piece.of(given[at], region.rank, region.size) for at, piece in self._places.items()}
        args, kwargs = tree_map_only(Tensor, lambda each: parts.get(id(each), each), (args, kwargs))
        return super().forward(*args, **kwargs)


class Draws(Cut):
    """`_order`: the part of which each of its dropouts is, in the order of their calls."""

    _order: Sequence[Piece | None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._region.drawing(self._order):
            return super().forward(*args, **kwargs)


class Buffers(Cut):
    """`_used`: the dim and the stretches of it that this rank uses, by the names of buffers."""

    _used: Mapping[str, tuple[int, Stretches]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self._buffers
        parts = {name: _part(cast(Tensor, own[name]), dim, stretches) for name, (dim, stretches) in self._used.items()}
        versions = {name: part._version for name, part in parts.items() if not part.is_inference()}
        self.__dict__["_buffers"] = {**own, **parts}
        try:
            result = super().forward(*args, **kwargs)
        finally:
            self.__dict__["_buffers"] = own
        # the kernels of norms do not say that they write their statistics
        written = isinstance(self, _NormBase) and self.training and self.track_running_stats
        for name, before in versions.items():
            if written or parts[name]._version != before:
                self._share(cast(Tensor, own[name]), parts[name], *self._used[name])
        return result

    @torch.no_grad()
    def _share(self, whole: Tensor, part: Tensor, dim: int, stretches: Stretches) -> None:
        """Writes the parts of all ranks into the whole buffer."""
        added, at = torch.zeros_like(whole), 0
        for start, stop in stretches:
            added.narrow(dim, start, stop - start).copy_(part.narrow(dim, at, stop - start))
            at += stop - start
        whole.copy_(reduce_from(added, self._region.group, "buffers"))


def _part(whole: Tensor, dim: int, stretches: Stretches) -> Tensor:
    """Returns the stretches of a dim, copied: a forward may run again from what the buffer was."""
    return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in stretches], dim)

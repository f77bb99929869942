"""Asks of a module, by numbers, whether what lies between its columns and its rows computes each feature by itself.

A feed-forward layer that takes a mean, a cutoff or a norm over all features cannot be cut there: a rank would take it
over its own. The plans of `transformers` cut it all the same (Gemma 3n, where activations are sparse).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import _disable_current_modes

_INTO, _INSIDE, _ROWS = 6, 32, 16
"""Sizes of the small layers that the question is asked with: whatever the module's own are, it takes a millisecond."""
_CLOSE = 1e-3
"""Largest difference that counts as rounding, of the largest value: modules may compute in fp32 inside."""


def mixes_features(module: nn.Module, kinds: Mapping[str, str]) -> bool:
    """True if the rows of `module` are given other features where two ranks compute half of them each.

    kinds: of its own layers, by name; small linear layers with drawn weights stand for those that are "column",
        "packed" or "row"

    One that does not run so (on a single tensor) is not judged: False.
    """
    with torch.no_grad(), _disable_current_modes(), torch.device("cpu"):
        draw = torch.Generator().manual_seed(0)
        x, gives = (torch.randn(_ROWS, _INTO, generator=draw, dtype=torch.float64) for _ in range(2))
        try:
            layers = {
                name: _small(each, kinds.get(name, ""), draw)
                for name, each in module._modules.items()  # named_children() leaves out the second name of a layer
                if each is not None
            }
            whole = _given_to_rows(module, layers, kinds, x, gives, slice(0, _INSIDE))
            halves = [
                _given_to_rows(module, layers, kinds, x, gives, slice(start, start + _INSIDE // 2))
                for start in (0, _INSIDE // 2)
            ]
            return any(
                float((torch.cat(parts, -1) - wanted).abs().max()) > _CLOSE * float(wanted.abs().max())
                for wanted, *parts in zip(whole, *halves, strict=True)  # no number is more than one that is none
            )
        except Exception:  # whatever a module raises on what it was not made for, or where it has no values
            return False


class _Row(nn.Linear):
    """Stands for a row: keeps what it is `given`, and gives the same on all ranks, as a sum over them is."""

    def __init__(self, given: list[Tensor], gives: Tensor) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self._given, self._gives = given, gives

    def forward(self, x: Tensor) -> Tensor:
        self._given.append(x)
        return self._gives


def _given_to_rows(
    module: nn.Module, layers: Mapping[str, nn.Module], kinds: Mapping[str, str], x: Tensor, gives: Tensor, part: slice
) -> list[Tensor]:
    """Returns what the rows of `module` are given, in the order of their calls, on a rank whose columns have the
    features `part`; its small `layers` take the place of its own in a copy."""
    given: list[Tensor] = []
    own = {
        name: _Row(given, gives) if kinds.get(name) == "row" else _part(each, kinds.get(name, ""), part)
        for name, each in layers.items()
    }
    other = copy(module)
    other.__dict__.update(_modules=own, training=False)
    other.forward(x)
    return given


def _small(layer: nn.Module, kind: str, draw: torch.Generator) -> nn.Module:
    """Returns a small layer with drawn weights for one that is cut by columns; dropouts drop nothing."""
    if isinstance(layer, _DropoutNd):
        return nn.Identity()
    if kind not in ("column", "packed"):
        return layer
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"a {type(layer).__name__} is not judged")
    rows = _INSIDE if kind == "column" else 2 * _INSIDE
    weight = torch.randn(rows, _INTO, generator=draw, dtype=torch.float64)
    return _linear(weight, None if layer.bias is None else torch.randn(rows, generator=draw, dtype=torch.float64))


def _part(layer: nn.Module, kind: str, part: slice) -> nn.Module:
    """Returns what a rank has of a small layer: of each of a packed one's the same rows."""
    if kind not in ("column", "packed") or not isinstance(layer, nn.Linear):
        return layer
    rows = torch.arange(layer.out_features).view(-1, _INSIDE)[:, part].flatten()
    return _linear(layer.weight[rows], None if layer.bias is None else layer.bias[rows])


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer

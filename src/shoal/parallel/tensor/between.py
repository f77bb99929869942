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
    """True if two halves of `module` do not add up to all of it.

    kinds: of its own layers, by name; small linear layers with drawn weights stand for those that are "column",
        "packed" or "row"

    One that does not run so (on a single tensor) is not judged: False.
    """
    with torch.no_grad(), _disable_current_modes(), torch.device("cpu"):
        draw = torch.Generator().manual_seed(0)
        try:
            layers = {
                name: _small(each, kinds.get(name, ""), draw)
                for name, each in module._modules.items()
                if each is not None
            }
            x = torch.randn(_ROWS, _INTO, generator=draw, dtype=torch.float64)
            whole = _with(module, layers).forward(x)
            halves = [
                _with(module, {name: _half(each, kinds.get(name, ""), at) for name, each in layers.items()}).forward(x)
                for at in range(2)
            ]
            far = float((halves[0] + halves[1] - whole).abs().max())
            return far > _CLOSE * float(whole.abs().max())  # no number is more than one that is none
        except Exception:  # whatever a module raises on what it was not made for, or where it has no values
            return False


def _with(module: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Returns `module` in evaluation mode with other `layers`; it is left as it is."""
    other = copy(module)
    other.__dict__.update(_modules=dict(layers), training=False)
    return other


def _small(layer: nn.Module, kind: str, draw: torch.Generator) -> nn.Module:
    """Returns a small layer with drawn weights for one that is cut; dropouts drop nothing."""
    if isinstance(layer, _DropoutNd):
        return nn.Identity()
    if kind not in ("column", "packed", "row"):
        return layer
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"a {type(layer).__name__} is not judged")
    given = _INSIDE if kind == "row" else _INTO
    gives = {"row": _INTO, "column": _INSIDE, "packed": 2 * _INSIDE}[kind]
    weight = torch.randn(gives, given, generator=draw, dtype=torch.float64) / given**0.5
    bias = None if layer.bias is None else torch.randn(gives, generator=draw, dtype=torch.float64)
    return _linear(weight, bias)


def _half(layer: nn.Module, kind: str, at: int) -> nn.Module:
    """Returns what one of two ranks has of a small layer; a row's bias is the first one's."""
    if not isinstance(layer, nn.Linear) or kind not in ("column", "packed", "row"):
        return layer
    inside = slice(at * _INSIDE // 2, (at + 1) * _INSIDE // 2)
    if kind == "row":
        return _linear(layer.weight[:, inside], layer.bias if at == 0 else None)
    rows = torch.arange(layer.out_features).view(-1, _INSIDE)[:, inside].flatten()
    return _linear(layer.weight[rows], None if layer.bias is None else layer.bias[rows])


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer

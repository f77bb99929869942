"""The norms of a gradient by layer, as the page's table shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .metrics import StepRecord


@dataclass(frozen=True)
class LayerNorm:
    """Of a layer the norm in the `first` and the `last` step that has norms, the `largest` of all and its part (0 to 1) of the largest of the last step."""

    layer: str
    first: float
    last: float
    largest: float
    part: float


@dataclass(frozen=True)
class LayerNorms:
    """All layers, from the `first` to the `last` step."""

    first: int
    last: int
    layers: list[LayerNorm]


def layer_norms(steps: Sequence[StepRecord]) -> LayerNorms | None:
    """What the steps say of their layers; None where none has norms."""
    found = [(record.step, record.norms) for record in steps if record.norms]
    if not found:
        return None
    (first, begun), (last, ended) = found[0], found[-1]
    top = max((norm for norm in ended.values() if math.isfinite(norm)), default=0.0) or 1.0
    return LayerNorms(
        first,
        last,
        [
            LayerNorm(
                layer,
                begun.get(layer, math.nan),
                norm,
                max(norms[layer] for _, norms in found if layer in norms),
                norm / top if math.isfinite(norm) else 1.0,
            )
            for layer, norm in ended.items()
        ],
    )

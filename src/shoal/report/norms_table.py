"""The gradient norms by layer, for the page's table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .metrics import StepRecord


@dataclass(frozen=True)
class LayerNorm:
    """The gradient norms of a layer.

    first, last: in the first and in the last step with norms.
    largest: over all steps.
    part: `last` relative to the largest layer's, 0 to 1.
    """

    layer: str
    first: float
    last: float
    largest: float
    part: float


@dataclass(frozen=True)
class LayerNorms:
    """The gradient norms of all layers, from the `first` to the `last` step with norms."""

    first: int
    last: int
    layers: list[LayerNorm]


def layer_norms(steps: Sequence[StepRecord]) -> LayerNorms | None:
    """Collects the gradient norms of `steps` by layer; None where no step has norms."""
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

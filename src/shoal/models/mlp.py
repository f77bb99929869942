"""A multi-layer perceptron. Shape suffixes: B batch, I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from shoal.errors import ArgumentError
from shoal.models.checks import fraction, one_of, positive

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU, "sigmoid": nn.Sigmoid}


class MLP(nn.Module):
    """Linear layers of the widths `sizes`; the activation, then dropout, stand between them, and nothing after the
    last.

    `MLP([773, 515, 515, 1], "tanh")` maps [B, 773] to [B, 1].
    """

    def __init__(self, sizes: Sequence[int], activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ArgumentError("sizes", f" = {list(sizes)} of MLP must name at least the inputs and the outputs.")
        for size in sizes:
            positive("MLP", "sizes", size)
        one_of("MLP", "activation", activation, list(ACTIVATIONS))
        fraction("MLP", "dropout", dropout)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), ACTIVATIONS[activation](), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers[:-2])

    def forward(self, inputs_BI: Tensor) -> Tensor:
        return self.layers(inputs_BI)

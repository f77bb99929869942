"""A client's memory for the weights of one server on their way, and for gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.comm.codecs import Codec, ErrorFeedback
from shoal.server.layout import Layout


class Carried:
    """The chunks of `layout`, on `device`: weights as they come, gradients as they go, encoded where there is a codec.
    What encoding loses goes with the next gradient.

    weights: also what the server has of BatchNorm's statistics, which are on the CPU.
    shapes: of the parameters, by name.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.shapes = {slot.name: tuple(slot.shape) for each in layout.stretches for slot in each.slots}
        self._codecs: list[ErrorFeedback] = []
        self._take(device)
        if not layout.codec.lossless:
            self._codecs = [ErrorFeedback(layout.codec, each.numel, device) for each in layout.trained]

    def move(self, device: torch.device) -> None:
        """Goes on with memory on another device, between two requests."""
        if device != self.device:
            self._take(device)
            for codec in self._codecs:
                codec.residual = codec.residual.to(device)

    def put(self, parameters: Mapping[str, Tensor]) -> None:
        """Copies the weights that have come into `parameters`."""
        with torch.no_grad():
            for stretch, flat in zip(self.layout.stretches, self.weights, strict=False):
                for slot in stretch.slots:
                    parameters[slot.name].copy_(slot.view(flat))

    def gather(self, gradients: Mapping[str, Tensor | None]) -> tuple[list[str], list[Tensor]]:
        """Returns which parameters have no gradient, and the raw tensors of a push, until the next call."""
        untouched: list[str] = []
        for stretch, flat in zip(self.layout.trained, self._gradients, strict=True):
            for slot in stretch.slots:
                gradient = gradients[slot.name]
                if gradient is None:
                    untouched.append(slot.name)
                    slot.view(flat).zero_()
                else:
                    slot.view(flat).copy_(gradient.to_dense() if gradient.is_sparse else gradient.detach())
        if not self._codecs:
            return untouched, self._gradients
        for codec, flat, encoded in zip(self._codecs, self._gradients, self._encoded, strict=True):
            codec.encode(flat, encoded)
        return untouched, self._encoded

    def _take(self, device: torch.device) -> None:
        layout, codec = self.layout, self.layout.codec
        self.device = device
        self.weights = layout.weights_on(device)
        self._gradients = [torch.zeros(each.numel, dtype=each.grad_dtype, device=device) for each in layout.trained]
        self._encoded = [_bytes(codec, each.numel, device) for each in layout.trained if not codec.lossless]


def _bytes(codec: Codec, numel: int, device: torch.device) -> Tensor:
    return torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8, device=device)

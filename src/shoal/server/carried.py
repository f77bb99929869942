"""A client's memory for the weights of one server on their way, and for gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.comm.codecs import Codec, ErrorFeedback
from shoal.server.layout import Layout


class Carried:
    """The chunks of `layout`, on `device`: weights as they come, gradients as they go, encoded where there is a codec.
    What encoding loses goes with the next gradient of which an update is made.

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
        self._before = [codec.residual.clone() for codec in self._codecs]

    def move(self, device: torch.device) -> None:
        """Goes on with memory on another device, between two requests."""
        if device != self.device:
            self._take(device)
            for codec in self._codecs:
                codec.residual = codec.residual.to(device)
            self._before = [each.to(device) for each in self._before]

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
        left_alone = set(untouched)
        for index, stretch in enumerate(self.layout.trained):
            codec, before = self._codecs[index], self._before[index].copy_(self._codecs[index].residual)
            waits = [slot for slot in stretch.slots if slot.name in left_alone]  # nothing may be applied of these
            for slot in waits:
                slot.view(codec.residual).zero_()
            codec.encode(self._gradients[index], self._encoded[index])
            for slot in waits:
                slot.view(codec.residual).copy_(slot.view(before))
        return untouched, self._encoded

    def take_back(self) -> None:
        """Keeps what it kept before the last call of `gather`: no update is made of that."""
        for codec, before in zip(self._codecs, self._before, strict=True):
            codec.residual.copy_(before)

    def _take(self, device: torch.device) -> None:
        layout, codec = self.layout, self.layout.codec
        self.device = device
        self.weights = layout.weights_on(device)
        self._gradients = [torch.zeros(each.numel, dtype=each.grad_dtype, device=device) for each in layout.trained]
        self._encoded = [_bytes(codec, each.numel, device) for each in layout.trained if not codec.lossless]


def _bytes(codec: Codec, numel: int, device: torch.device) -> Tensor:
    return torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8, device=device)

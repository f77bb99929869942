"""Error feedback: what a codec lost in one step is added to what it encodes in the next."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.comm.codecs.codec import BLOCK, Codec


class ErrorFeedback:
    """A codec with memory, one object a chunk (Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847, algorithm 2):

            corrected = flat + residual;    send encode(corrected);    residual = corrected - decode(encode(corrected))

    What was sent and the residual thus sum to all inputs. `residual` (fp32, `numel` elements) is state for the
    checkpoint: read it, or copy into it. Non-finite residuals become zero, so a step that is refused for its gradients
    does not spoil the next ones.

    Decoding is that of the codec: the sender's residual is what the receiver lacks.
    """

    lossless = False

    def __init__(self, codec: Codec, numel: int, device: torch.device | str = "cpu") -> None:
        self.codec = codec
        self.residual = torch.zeros(numel, device=device)

    @classmethod
    def over(cls, codec: Codec, residual: Tensor) -> ErrorFeedback:
        """Makes a codec that updates `residual` (fp32, flat), which is kept elsewhere, in place."""
        feedback = cls(codec, 0)
        feedback.residual = residual
        return feedback

    @property
    def row(self) -> int | None:
        return self.codec.row

    def encoded_bytes(self, numel: int) -> int:
        return self.codec.encoded_bytes(numel)

    def encode(self, flat: Tensor, out: Tensor) -> None:
        """Encodes flat + residual into `out` and renews the residual.

        `flat`: a whole chunk; bytes may be cut by rows.
        """
        if flat.shape != self.residual.shape or out.shape != (self.encoded_bytes(flat.numel()),):
            raise ValueError(
                f"error feedback over {self.residual.numel()} elements, "
                f"{self.encoded_bytes(self.residual.numel())} bytes encoded, got {tuple(flat.shape)} for "
                f"{tuple(out.shape)} bytes: one object serves one whole chunk"
            )
        for start, stop in self._cuts(flat):
            corrected = self.residual[start:stop].add_(flat[start:stop].float())
            data = out[self.encoded_bytes(start) : self.encoded_bytes(stop)]
            self.codec.encode(corrected, data)
            self.codec.decode_add(data, corrected, -1.0)
            corrected.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def decode(self, data: Tensor, out: Tensor) -> None:
        self.codec.decode(data, out)

    def decode_add(self, data: Tensor, out: Tensor, scale: float = 1.0) -> None:
        self.codec.decode_add(data, out, scale)

    def _cuts(self, flat: Tensor) -> list[tuple[int, int]]:
        """Returns ranges of whole rows that stay in the CPU's cache; one range on a GPU or without rows."""
        numel, row = flat.numel(), self.codec.row
        step = max(1, numel) if row is None or flat.device.type != "cpu" else max(row, BLOCK // row * row)
        return [(start, min(start + step, numel)) for start in range(0, numel, step)]

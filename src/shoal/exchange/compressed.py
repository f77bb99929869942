"""Gradients summed through a codec: `fp16`, `bf16`, ByteGrad's 8 bits (`bytegrad`), or any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm.codecs import codec
from shoal.exchange.algorithm import Algorithm, Replica, State
from shoal.exchange.scatter_gather import Feedback, scatter_gather
from shoal.exchange.sends import CODED, TWICE, Sends, coded
from shoal.plan import Option


@dataclass
class Compressed(Algorithm):
    """Scatter-gather through `codec`, with sums in fp32.

    With `error_feedback` nothing is lost, only delayed (three more fp32 copies of the gradients, and one of this rank's
    cut).
    """

    codec: Option = "u8"
    error_feedback: bool = False
    chunk_bytes: int | None = 4 * 2**20

    def sends(self, ranks: int, itemsize: int, side: float) -> Sends:
        return Sends(coded(self.codec, itemsize), CODED, handed=TWICE)

    def __post_init__(self) -> None:
        self._codec = codec(self.codec)

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        self._feedback = Feedback(replica.chunks, replica.group) if self.error_feedback else None
        self._index = {chunk.index: index for index, chunk in enumerate(replica.chunks)}

    def reduce(self, chunk: Chunk, own_mean: Tensor) -> None:
        index = self._index[chunk.index]
        residuals = (None, None) if self._feedback is None else self._feedback.take(index)
        scatter_gather(chunk.gradient, self.replica.group, self._codec, f"gradients {chunk.index}", *residuals)
        chunk.clear_padding(chunk.gradient)
        if self._feedback is not None:
            self._feedback.clear_padding(index)

    @property
    def keeps_back(self) -> bool:
        return self.error_feedback

    def begin(self, step: int) -> None:
        if self._feedback is not None:
            self._feedback.drop()

    def renew(self, to_mean: Tensor, skip: Tensor | None, untouched: Sequence[str]) -> None:
        if self._feedback is not None:
            self._feedback.commit(to_mean, skip, untouched)

    def state(self) -> dict[str, State]:
        return {} if self._feedback is None else self._feedback.state()

    def restored(self) -> None:
        if self._feedback is not None:
            self._feedback.restored()

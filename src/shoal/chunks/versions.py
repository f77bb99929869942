"""Several versions of the weights, for schedules that update while microbatches are in flight: each microbatch goes on
with the weights that it began with.

A version is a buffer for each chunk, written once, when an update publishes the masters into it; the module's
parameters are views of one version or another. So only updates copy, and autograd's views of weights stay those of
their version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.chunks.chunk import Chunk


class Versions:
    """Keeps `keep` versions of `chunks`, whose masters lie beside their data.

    A version has the number of updates before it; `newest` is the one that chunks hold.
    """

    def __init__(self, chunks: Sequence[Chunk], parameters: Mapping[str, nn.Parameter], keep: int) -> None:
        self._chunks, self.keep = [chunk for chunk in chunks if chunk.trainable], keep
        self._parameters = parameters
        self._buffers = [[chunk.data, *(chunk.another() for _ in range(keep - 1))] for chunk in self._chunks]
        self.newest = self._bound = 0
        self._oldest = 0

    def bind(self, number: int) -> None:
        """Makes the module's parameters views of version `number`, or of the oldest that is kept, if it is older."""
        number = max(number, self._oldest)
        assert number <= self.newest, f"version {number} of {self.newest}"
        if number != self._bound:
            self._bound = number
            for chunk, buffers in zip(self._chunks, self._buffers, strict=True):
                data = buffers[number % self.keep]
                for slot in chunk.slots:
                    self._parameters[slot.name].data = slot.view(data)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Context in which an update publishes a new version in place of the oldest; if that fails there is no new
        one."""
        before = self.newest, self._oldest
        self.newest += 1
        self._oldest = max(self._oldest, self.newest - self.keep + 1)
        self._hold()
        try:
            # autograd counts writes by tensor, not by memory: the counter of the module's parameters is that of the
            # buffers they were made of, whichever version they show
            with torch.autograd._unsafe_preserve_version_counter(tuple(buffers[0] for buffers in self._buffers)):
                yield
        except BaseException:
            self.newest, self._oldest = before
            self._hold()
            raise

    def _hold(self) -> None:
        for chunk, buffers in zip(self._chunks, self._buffers, strict=True):
            chunk.hold(buffers[self.newest % self.keep])

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [slot.name for chunk in self._chunks for slot in chunk.slots]

    @property
    def kept(self) -> list[int]:
        """Numbers of the versions before the newest, latest first."""
        return list(range(self.newest - 1, self._oldest - 1, -1))

    def tensors(self, number: int) -> dict[str, Tensor]:
        """Parameters of a version, by name."""
        parts = zip(self._chunks, self._buffers, strict=True)
        return {slot.name: slot.view(buffers[number % self.keep]) for chunk, buffers in parts for slot in chunk.slots}

    @torch.no_grad()
    def restart(self, number: int, older: Sequence[int]) -> None:
        """Calls what chunks hold version `number`, and forgets others; buffers of the versions `older` are to be filled
        next, through `tensors`."""
        held = [chunk.data.clone() for chunk in self._chunks]
        self.newest, self._oldest, self._bound = number, min([number, *older]), -1
        self._hold()
        for chunk, data in zip(self._chunks, held, strict=True):
            chunk.data.copy_(data)
        self.bind(number)

"""Collects gradients into their chunks and hands full chunks to the algorithm during the last backward, strictly in order.

Autograd's own gradient of a parameter is copied (the first time in a step) or added to its view of the chunk as soon as it is there, and
let go: one pass over memory, with the cast to the chunk's dtype in it, and nothing to zero beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.comm import Group, Lane
from shoal.errors import UserError

if TYPE_CHECKING:
    from shoal.exchange import Algorithm


class Reducer:
    """Watches each parameter's gradient; a chunk is handed over when all its parameters are in and it is at the front.

    `touched[name]` says whether any backward of this step reached the parameter here. `norms` are the reduced chunks' 2-norms,
    taken on the lane while the chunk is still in the cache.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        parameters: Mapping[str, torch.nn.Parameter],
        group: Group,
        algorithm: Algorithm,
        lane: Lane,
    ) -> None:
        self._chunks, self._group, self._algorithm, self._lane = chunks, group, algorithm, lane
        self.touched: dict[str, bool] = {}
        self.norms: list[Tensor] = []
        self._armed = False
        self._missing: list[set[str]] = []
        self._front = 0
        for place, chunk in enumerate(chunks):
            for slot in chunk.slots:
                self.touched[slot.name] = False
                assert chunk.grad is not None
                parameters[slot.name].register_post_accumulate_grad_hook(self._hook(place, slot.name, slot.view(chunk.grad)))

    def begin(self) -> None:
        """A new step: nothing has been touched, whatever the chunks hold is of the step before."""
        self.touched = dict.fromkeys(self.touched, False)
        self._missing = [{slot.name for slot in chunk.slots} for chunk in self._chunks]
        self.norms = [torch.empty(0)] * len(self._chunks)
        self._front = 0

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Inside, a chunk that is complete is exchanged while backward goes on."""
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def finish(self) -> None:
        """Hands over what is left (parameters that this step did not touch count as zero) and waits for the lane."""
        for chunk, missing in zip(self._chunks, self._missing, strict=True):
            missing.clear()
            for slot in chunk.slots:
                if not self.touched[slot.name]:
                    assert chunk.grad is not None
                    slot.view(chunk.grad).zero_()
        self._advance()
        self._lane.wait()

    def _hook(self, place: int, name: str, view: Tensor) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if self.touched[name]:
                view.add_(parameter.grad)
            else:
                view.copy_(parameter.grad)
                self.touched[name] = True
            parameter.grad = None
            if self._armed:
                if name not in self._missing[place]:
                    raise UserError(
                        f"the gradient of {name} came twice in one backward, as reentrant checkpointing of shared weights does it: "
                        "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                    )
                self._missing[place].discard(name)
                if place == self._front:
                    self._advance()

        return arrived

    def _advance(self) -> None:
        while self._front < len(self._chunks) and not self._missing[self._front]:
            place = self._front
            self._front += 1
            self._lane.submit(lambda place=place: self._exchange(place))  # type: ignore[misc]

    def _exchange(self, place: int) -> None:
        chunk = self._chunks[place]
        assert chunk.grad is not None
        self._algorithm.run(chunk, self._group)
        self.norms[place] = torch.linalg.vector_norm(chunk.grad)

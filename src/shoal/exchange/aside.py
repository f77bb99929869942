"""Storage for the gradients of the step under way while those of the step before are still exchanged and applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shoal.chunks import Chunk, Slot, weakly
from shoal.errors import UserError
from shoal.exchange.rows import put


class Aside:
    """Sums the gradients of `parameters` in storage laid out as `chunks`.

    `touched[name]`: whether there has been one.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            if chunk.sparse or chunk.borrows:
                borrows = "has no gradient of its own (plan.zero = 2 or plan.memory)"
                raise UserError(
                    f"{chunk.slots[0].name} {'has rows for gradients' if chunk.sparse else borrows}, which a schedule "
                    "without a flush would have to keep twice: take one with a flush, such as 1f1b"
                )
        self.flats = [chunk.like_gradient() for chunk in chunks]
        self._views = {
            slot.name: slot.view(flat) for chunk, flat in zip(chunks, self.flats, strict=True) for slot in chunk.slots
        }
        self.touched = dict.fromkeys(self._views, False)
        arrived = weakly(self._arrived)
        for chunk in chunks:
            for slot in chunk.slots:
                parameters[slot.name].register_post_accumulate_grad_hook(partial(arrived, slot))

    @torch.no_grad()
    def clear(self) -> None:
        """Clears the gradients for another step."""
        for flat in self.flats:
            flat.zero_()
        self.touched = dict.fromkeys(self.touched, False)

    @torch.no_grad()
    def _arrived(self, slot: Slot, parameter: Tensor) -> None:
        assert parameter.grad is not None
        put(self._views[slot.name], parameter.grad, self.touched[slot.name])
        parameter.grad, self.touched[slot.name] = None, True

"""A chunk: flat storage of parameters that share a dtype, a group and an optimizer group.

    offset 0        64-byte aligned            64-byte aligned         size
    | weight ......... |pad| bias .. |  pad  | weight ............... |
    data    what the module sees (the model's dtype); parameters are views, never re-bound
    grad    what is reduced (fp32, or fp64 for fp64 parameters); autograd's gradients are copied in as they come
    master  what the optimizer updates: fp32 beside low-precision data, else data itself

Padding is zero in all three, so norms and reductions run over the flat storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.chunks.allocate import ALIGNMENT, Allocator

NORM_PIECE = 1 << 18
"""Elements that are summed in the gradient's own precision before the sum goes on in fp64; 1 MiB of fp32, which a core's cache holds."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies: `numel` elements of `shape` at `offset`, in elements."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's tensor inside `flat`."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


class Chunk:
    """Replicated storage of `slots`; a frozen chunk (`trainable=False`) has neither gradient nor master. Of a `sparse` one autograd gives
    rows of the gradient of its only parameter."""

    def __init__(
        self,
        index: int,
        slots: tuple[Slot, ...],
        dtype: torch.dtype,
        master_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        trainable: bool,
        allocate: Allocator,
        allocate_gradient: Allocator | None = None,
        sparse: bool = False,
    ) -> None:
        self.index, self.slots, self.trainable, self.sparse = index, slots, trainable, sparse
        self.size = slots[-1].offset + slots[-1].numel
        self.data = allocate(self.size, dtype)
        self.master = self.data if not trainable or master_dtype == dtype else allocate(self.size, master_dtype)
        self.grad = (allocate_gradient or allocate)(self.size, grad_dtype) if trainable else None

    @classmethod
    def of_gradient(cls, index: int, slots: tuple[Slot, ...], flat: Tensor) -> Chunk:
        """A chunk whose gradient is `flat`, storage of somebody else that is laid out as `slots`; it has neither data nor master."""
        chunk = cls(index, slots, flat.dtype, flat.dtype, flat.dtype, True, lambda numel, dtype: flat)
        chunk.data = chunk.master = flat.new_empty(0)
        return chunk

    @property
    def gradient(self) -> Tensor:
        """`grad` of a trainable chunk."""
        assert self.grad is not None, "a frozen chunk has no gradient"
        return self.grad

    @property
    def nbytes(self) -> int:
        """Bytes of data, gradient and master together."""
        parts = [self.data] if self.master is self.data else [self.data, self.master]
        return sum(part.nbytes for part in parts + ([self.grad] if self.grad is not None else []))

    def norm_pieces(self, part: int = 0, parts: int = 1) -> list[Tensor]:
        """The gradient as flat views, for sums of squares: of a parameter's own elements only and cut by its shape alone, so that the
        norm of all does not depend on which parameters share a chunk. `part` of `parts` about even ones."""
        flats = [slot.view(self.gradient).view(-1) for slot in self.slots]
        pieces = [piece for flat in flats for piece in flat.split(NORM_PIECE)]
        return pieces[len(pieces) * part // parts : len(pieces) * (part + 1) // parts]

    def clear_padding(self, flat: Tensor) -> None:
        """Makes the gaps between slots zero again in `flat`, laid out as this chunk, after something lossy has gone over all of it."""
        for slot, following in zip(self.slots, self.slots[1:], strict=False):
            flat[slot.offset + slot.numel : following.offset].zero_()

    def publish(self) -> None:
        """Casts the updated master into what the module sees; nothing to do where they are one."""
        if self.master is not self.data:
            self.data.copy_(self.master)


def aligned(numel: int, itemsize: int) -> int:
    """`numel` rounded up so that the next slot starts on ALIGNMENT bytes."""
    per_line = max(1, ALIGNMENT // itemsize)
    return -(-numel // per_line) * per_line


def sum_of_squares(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements (0-dim, fp64); 0 of none."""
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(list(pieces))).double().square().sum()

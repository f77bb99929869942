"""A flat buffer: parameters one after the other in one tensor, with their gradients and masters laid out alike.

    offset 0        64-byte aligned            64-byte aligned         size
    | weight ......... |pad| bias .. |  pad  | weight ............... |
    data      what the module sees, in the model's dtype
    grad      what is reduced: fp32, or fp64 for fp64 parameters
    masters   what the optimizer updates: fp32 values beside low-precision data; None where the data are the masters

Padding is zero in all three, so norms and reductions run over the flat tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.chunks.exact import DIGITS, exact_sum
from shoal.chunks.masters import CompactMasters, MasterStore
from shoal.chunks.spec import ChunkSpec, Slot, flat_views, gaps
from shoal.device import is_accelerator

NORM_PIECE = 1 << 18
"""Elements summed in the gradient's own precision before the sum goes on in fp64: 1 MiB of fp32, which a core's cache
holds."""


class Buffer:
    """Memory of the parameters, or parts of them, that this rank owns of the chunk `spec`.

    - `slots`: where they lie
    - `data`, `grad`: 1-D, of equal length; no `grad` if the chunk is frozen
    - `masters`: where the values are kept that the optimizer updates; None: in `data`
    - `data_is_new`: the update has written the data as well as the masters
    """

    def __init__(
        self,
        spec: ChunkSpec,
        slots: tuple[Slot, ...],
        data: Tensor,
        grad: Tensor | None = None,
        masters: MasterStore | None = None,
    ) -> None:
        self.spec, self.slots, self.size = spec, slots, data.numel()
        self.index, self.trainable = spec.index, spec.trainable
        self.data, self.grad, self.masters = data, grad, masters
        self.data_is_new = False

    @property
    def gradient(self) -> Tensor:
        """`grad` of a trainable chunk."""
        assert self.grad is not None, "a frozen chunk has no gradient"
        return self.grad

    def gradient_dtype_on(self, device: torch.device) -> torch.dtype:
        """Dtype that the gradient would have on `device`: kernels of an accelerator want the masters'."""
        return self.master_like.dtype if is_accelerator(device) else self.gradient.dtype

    @property
    def gaps(self) -> list[slice]:
        """Stretches in which no parameter lies."""
        return gaps(self.slots, self.size)

    @property
    def master(self) -> Tensor:
        """Masters, brought into memory, where an update may change them."""
        if self.masters is None:
            return self.data
        self.masters.open(self.data)
        return self.masters.values

    @property
    def master_like(self) -> Tensor:
        """Masters for dtype and device alone: they may have no memory now."""
        return self.data if self.masters is None else self.masters.values

    @property
    def master_to_read(self) -> Tensor:
        """Masters, not to be changed: those on a disk as they lie there."""
        return self.data if self.masters is None else self.masters.read(self.data)

    @property
    def rest_of_masters(self) -> Tensor | None:
        """Tensor that compact masters keep beside the data."""
        return self.masters.rest if isinstance(self.masters, CompactMasters) else None

    @property
    def lower_halves(self) -> Tensor | None:
        """Lower 16 bits (int16) of the fp32 values, where masters rest split; `data` are the upper ones."""
        return self.masters.lower_halves if isinstance(self.masters, CompactMasters) else None

    @property
    def nbytes_masters(self) -> int:
        """Bytes of memory that masters take between updates, beside the data."""
        return 0 if self.masters is None else self.masters.nbytes

    def rest(self, turn: int = -1) -> None:
        """Casts the masters into the data, unless the update has done so, and closes them. `turn`: the step, a key of
        stochastic rounding."""
        is_cast, self.data_is_new = self.data_is_new, False
        if self.masters is not None:
            self.masters.close(self.data, turn, is_cast)

    def norm_pieces(self, part: int = 0, parts: int = 1) -> list[Tensor]:
        """Flat views of the gradient, for sums of squares: part `part` of `parts`, about even.

        They hold a parameter's own elements only and are cut by its shape alone, so the norm does not depend on which
        parameters share a chunk.
        """
        rank, ranks = self.spec.tp_copy
        part, parts = part * ranks + rank, parts * ranks
        (flats,) = flat_views(self.slots, self.gradient)
        pieces = [piece for flat in flats for piece in (flat.split(NORM_PIECE) if len(flat) > NORM_PIECE else [flat])]
        return pieces[len(pieces) * part // parts : len(pieces) * (part + 1) // parts]


def norms(pieces: Sequence[Tensor]) -> Tensor:
    """Norms of `pieces`, 1-D, where they are; in at least fp32."""
    if not pieces:
        return torch.empty(0)
    if pieces[0].dtype == torch.bfloat16:  # norms of it would be rounded to bf16
        return torch.stack([torch.linalg.vector_norm(piece.float()) for piece in pieces])
    return torch.stack(torch._foreach_norm(list(pieces)))


def sum_of_squares(found: Tensor, device: torch.device) -> Tensor:
    """Exact sum (see `exact`) of the squares of the `norms` that were `found`, as a row of digits on `device`."""
    if not len(found):
        return torch.zeros(DIGITS, dtype=torch.float64, device=device)
    return exact_sum(found.double().square()).to(device)

"""A chunk: parameters that share a dtype, a group of ranks and an optimizer group, as one unit of memory, of
communication and of movement.

    chunk.data        what the module sees: whole; parameters are permanent views of it
    chunk.grad        autograd's gradients are copied there as they come: whole, while it is there
    chunk.placement   which rank has what (see `shard`)
    chunk.owned       a flat buffer (see `buffer`): what this rank updates, with the masters

A rank owns all of a replicated chunk. Of a chunk that is cut it owns a stretch whose first and last slot may be parts
of parameters: only there it keeps masters, gets the sum of the gradients and updates. `publish` brings the weights
together.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from shoal.chunks.allocate import Allocator
from shoal.chunks.buffer import Buffer
from shoal.chunks.masters import CompactMasters, MasterStore, WholeMasters
from shoal.chunks.shard import Gathered, Placement, Replicated, Sharded, Shards
from shoal.chunks.spec import ChunkSpec, Slot, extent, gaps
from shoal.comm import Group


class Chunk:
    """Zeroed storage for `spec`.

    - `allocate`: gives all of it but what the ranks of `shards` share
    - `allocate_gradient`: gives the whole gradient, where it is not `allocate` as well
    - `shards`: the ranks among which the chunk is cut; None: it is replicated
    - `before_fill`: waits for an update of the chunk that is under way
    - `before_let_go`: looks at the whole data before it goes; `filled`: its version once it had come
    """

    def __init__(
        self,
        spec: ChunkSpec,
        allocate: Allocator,
        allocate_gradient: Allocator | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.spec, self.index, self.slots, self.size = spec, spec.index, spec.slots, spec.size
        self.trainable, self.sparse, self.grad_dtype = spec.trainable, spec.sparse, spec.grad_dtype
        self.before_fill: Callable[[Chunk], None] | None = None
        self.before_let_go: Callable[[Chunk], None] | None = None
        self.filled: int | None = None
        self.placement: Placement = Replicated()
        self.grad: Tensor | None = None
        if shards is None:
            self._allocate_data = allocate
            self.data = allocate(self.size, spec.dtype)
        else:
            allocate = shards.home or allocate
            self._allocate_data = lambda numel, dtype: shards.place(numel, dtype)[0]
            self.data, self.placement = shards.place(self.size, spec.dtype)
        if spec.trainable and (shards is None or shards.keep_gradients):
            self.grad = (allocate_gradient or allocate)(self.size, spec.grad_dtype)
        self.owned = self._own_all() if shards is None else self._own_stretch(shards.stretch(self.size), allocate)
        if spec.has_masters:
            self.owned.masters = _masters(spec, self.owned, allocate)

    def _own_all(self) -> Buffer:
        return Buffer(self.spec, self.slots, self.data, self.grad)

    def _own_stretch(self, own: slice, allocate: Allocator) -> Buffer:
        numel, gradient = own.stop - own.start, None
        data = allocate(numel, self.spec.dtype) if self.passes else self.data[own]
        if self.trainable:
            gradient = allocate(numel, self.grad_dtype) if self.grad is None else self.grad[own]
        parts = (slot.between(own.start, own.stop) for slot in self.slots)
        return Buffer(self.spec, tuple(part for part in parts if part is not None), data, gradient)

    @classmethod
    def of_gradient(cls, index: int, slots: tuple[Slot, ...], flat: Tensor) -> Chunk:
        """Makes a chunk whose gradient is `flat`, storage of somebody else laid out as `slots`; it has no data."""
        dtype = flat.dtype
        chunk = cls(ChunkSpec(index, slots, extent(slots), dtype, dtype, dtype), lambda numel, dtype: flat)
        chunk.hold(flat.new_empty(0))
        return chunk

    # where it lies

    @property
    def shards(self) -> Shards | None:
        """Ranks among which it is cut; None if it is replicated."""
        return self.placement.shards

    @property
    def group(self) -> Group | None:
        """Group of these ranks for weights."""
        return None if self.shards is None else self.shards.group

    @property
    def copy_number(self) -> int:
        """Index of this rank's copy of its stretch: 0 unless several groups shard the same (hybrid sharding)."""
        return 0 if self.shards is None else self.shards.copy[0]

    @property
    def is_cut(self) -> bool:
        """Whether ranks own stretches of it."""
        return self.shards is not None

    @property
    def passes(self) -> bool:
        """Whether `data` has memory between `open` and `let_go` only; each rank keeps its stretch, `owned.data`."""
        return isinstance(self.placement, Gathered)

    @property
    def borrows(self) -> bool:
        """Whether it keeps its stretch of the gradient only, and is lent a whole one while backward fills it."""
        return self.trainable and self.grad is None

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps: of data, gradient and masters, without what is gathered or lent for a while."""
        data, grad = (
            self.owned.data if self.passes else self.data,
            self.grad if self.grad is not None else self.owned.grad,
        )
        return data.nbytes + (0 if grad is None else grad.nbytes) + self.owned.nbytes_masters

    @property
    def nbytes_whole(self) -> int:
        """Bytes of the whole data while it is there."""
        return self.data.nbytes

    # weights that are gathered: an Executor moves them

    def open(self) -> None:
        """Allocates the memory of the whole data."""
        self._gathered.open(self.data)

    def fill(self) -> None:
        """Gathers the whole data; all its ranks call it."""
        self.settle()
        self._gathered.fill(self.data, self.owned.data, self.index, self.slots[-1].name)
        self.filled = self.data._version

    def settle(self) -> None:
        """Returns when no update of it is under way."""
        if self.before_fill is not None:
            self.before_fill(self)

    def let_go(self) -> None:
        """Frees the memory of the whole data; nobody may read it any more."""
        if self.before_let_go is not None and self.filled is not None:
            self.before_let_go(self)
        self.filled = None
        self._gathered.let_go(self.data)

    @property
    def _gathered(self) -> Gathered:
        assert isinstance(self.placement, Gathered)
        return self.placement

    @torch.no_grad()
    def stay(self) -> None:
        """Keeps gathered weights, and this rank's part of gradient and masters, on the device from now on."""
        self.open()
        self.fill()
        shards, owned = self._gathered.shards, self.owned
        self.placement = Sharded(shards, False)
        owned.data = self.data[shards.stretch(self.size)]
        if owned.masters is not None:
            assert isinstance(owned.masters, WholeMasters | CompactMasters), "masters on a disk stay there"
            owned.masters.to(owned.data.device)
        if owned.grad is not None:
            there = owned.grad.to(owned.data.device)  # and cast there, as in `masters.round_into`
            owned.grad = there.to(owned.gradient_dtype_on(there.device))

    # another storage of the data, for versions of the weights

    def another(self) -> Tensor:
        """Storage as its data is."""
        return self._allocate_data(self.size, self.data.dtype)

    def hold(self, data: Tensor) -> None:
        """Makes `data`, of `another`, the storage that updates are published in."""
        self.data = data
        self.owned.data = data if self.shards is None else data[self.shards.stretch(self.size)]

    # gradients

    @property
    def gradient(self) -> Tensor:
        """`grad` of a trainable chunk that keeps it."""
        assert self.grad is not None, "a frozen chunk has no gradient, and one that borrows has none of its own"
        return self.grad

    def with_gradient(self, flat: Tensor) -> Chunk:
        """A copy of this chunk with the gradient `flat`, of its size: what an algorithm reduces if the chunk
        borrows."""
        assert self.shards is not None
        lent, own = copy(self), flat[self.shards.stretch(self.size)]
        lent.grad, lent.owned = flat, Buffer(self.spec, self.owned.slots, self.owned.data, own)
        return lent

    def like_gradient(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros laid out as the whole gradient."""
        return torch.zeros(self.size, dtype=dtype or self.grad_dtype, device=self.data.device)

    def clear_padding(self, flat: Tensor) -> None:
        """Zeroes the gaps of `flat`, laid out as this chunk, after something lossy has gone over all of it."""
        for gap in gaps(self.slots, self.size):
            flat[gap].zero_()

    def reduce_scatter(self, purpose: str) -> None:
        """Sums the whole gradients of all ranks of a copy of a chunk that is cut into their owned stretches."""
        assert self.shards is not None
        self.shards.reduce_scatter(self.owned.gradient, self.gradient, purpose)

    def add_copies(self, own: Tensor, purpose: str) -> None:
        """Adds to `own`, the owned stretch of a copy's sum, those of the other copies."""
        assert self.shards is not None
        self.shards.add_copies(own, purpose)

    def norm_pieces(self, part: int = 0, parts: int = 1) -> list[Tensor]:
        """Views of the gradient (see Buffer): part `part` of `parts`; if the chunk is cut, what this copy of the owned
        stretch counts."""
        if self.shards is not None:
            part, parts = self.shards.copy
        return self.owned.norm_pieces(part, parts)

    # masters, and the weights made of them

    @property
    def master(self) -> Tensor:
        """Masters of a replicated chunk, in memory."""
        assert not self.is_cut, "the masters of a chunk that is cut are where it is owned"
        return self.owned.master

    def rest(self, turn: int = -1) -> None:
        """Casts the owned masters into the data and closes them (see Buffer)."""
        self.owned.rest(turn)

    def share(self) -> None:
        """Brings the updated stretches of all ranks together; all of them call it."""
        self.placement.share(self.data, self.owned.data, f"weights {self.index}")

    def publish(self, turn: int = -1) -> None:
        """Makes the updated masters what the module sees; all ranks of a chunk that is cut call it. `turn`: the step, a
        key of stochastic rounding."""
        self.rest(turn)
        self.share()

    def agree(self) -> None:
        """Takes the masters of the first copy of a chunk that is cut (hybrid sharding), and publishes them."""
        if self.shards is not None and self.shards.across is not None:
            self.shards.across.broadcast(self.owned.master, purpose="weights")
        self.publish()

    def gathered(self, own: Tensor, purpose: str) -> Tensor:
        """Returns, on the device, all of a flat tensor laid out as the chunk, of which each rank gives what it owns."""
        if self.group is None:
            return own
        own = own.to(self.data.device)
        return self.group.all_gather(own.new_empty(self.size), own, purpose=f"{purpose} {self.index}")

    def whole_master(self) -> Tensor | None:
        """Masters of the whole chunk, gathered on the first rank if need be, where all ranks call it together; the
        others then get None."""
        owned = self.owned
        if self.group is None or (owned.masters is None and not self.passes):
            return self.data if owned.masters is None else owned.master_to_read
        mine = owned.master_to_read
        whole = mine.new_empty(self.size) if self.group.rank == 0 else None
        return self.group.gather(whole, mine, purpose=f"masters {self.index}")


def _masters(spec: ChunkSpec, owned: Buffer, allocate: Allocator) -> MasterStore:
    values = allocate(owned.size, spec.master_dtype)
    return WholeMasters(values) if spec.keep == "whole" else CompactMasters(spec.keep, values, owned.slots)

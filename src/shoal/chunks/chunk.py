"""A chunk: flat storage of parameters that share a dtype, a group and an optimizer group.

    offset 0        64-byte aligned            64-byte aligned         size
    | weight ......... |pad| bias .. |  pad  | weight ............... |
    data    what the module sees (the model's dtype); parameters are views, never re-bound
    grad    what is reduced (fp32, or fp64 for fp64 parameters); autograd's gradients are copied in as they come
    master  what the optimizer updates: fp32 beside low-precision data, else data itself

Padding is zero in all three, so norms and reductions run over the flat storage.

A chunk may be cut evenly among ranks (ZeRO). Each then owns a stretch of it, `owned`, a chunk again whose first and last slot may be parts of
parameters: only there it keeps a master, gets the sum of gradients and updates; `publish` brings the weights together. Of a chunk that is
not cut a rank owns all: `owned` is the chunk itself.

    |  owned by rank 0  |  owned by rank 1  |
    | weight ......... |pad| bias .. | pad |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.chunks.allocate import ALIGNMENT, Allocator, Shards, Weights
from shoal.chunks.exact import DIGITS, exact_sum
from shoal.chunks.masters import CompactMasters, MasterStore
from shoal.comm import Group
from shoal.errors import UserError

NORM_PIECE = 1 << 18
"""Elements that are summed in the gradient's own precision before the sum goes on in fp64; 1 MiB of fp32, which a core's cache holds."""


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies: `numel` elements of `shape` at `offset`, in elements.

    Where a cut goes through it, `whole` is its shape, and here lie the elements from `start` on of its flat form.
    """

    name: str
    shape: torch.Size
    offset: int
    start: int = 0
    whole: torch.Size | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def full(self) -> torch.Size:
        """The parameter's whole shape, however much of it lies here."""
        return self.shape if self.whole is None else self.whole

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's tensor inside `flat`."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)

    def between(self, start: int, stop: int) -> Slot | None:
        """What lies of it in the stretch [start, stop), whose beginning is the new 0; None if nothing does."""
        if self.numel == 0:
            return replace(self, offset=self.offset - start) if start <= self.offset < stop else None
        first, last = max(start, self.offset), min(stop, self.offset + self.numel)
        if first == self.offset and last == self.offset + self.numel:
            return replace(self, offset=first - start)
        if first >= last:
            return None
        return Slot(self.name, torch.Size([last - first]), first - start, first - self.offset, self.shape)


class Chunk:
    """Replicated storage of `slots`; a frozen chunk (`trainable=False`) has neither gradient nor master. Of a `sparse` one autograd gives
    rows of the gradient of its only parameter. `beside`: which of how many ranks of a model that is cut this is, which have the same: they share the norm's
    work, and count it once. `apart`: "experts" or "tied", where other ranks have it than have the rest of what is here (see parallel.layout). `has_versions`: its
    masters lie apart from its data, of which there are several (see versions)."""

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
        shards: Shards | None = None,
        keep: str = "whole",
        size: int | None = None,
        beside: tuple[int, int] = (0, 1),
        apart: str = "",
        has_versions: bool = False,
    ) -> None:
        self.beside, self.apart = beside, apart
        self.index, self.slots, self.trainable, self.sparse = index, slots, trainable, sparse
        self.size = slots[-1].offset + slots[-1].numel if slots else 0
        self._shards = shards
        self._store: CompactMasters | MasterStore | None = None
        self.before_fill: Callable[[Chunk], None] | None = None  # waits for an update that is under way
        self.data_is_new = False  # an update has written the owned data as well as the master
        self._part: Chunk | None = None  # not itself where it is whole: it would live until the next garbage collection
        if shards is not None:
            allocate = shards.home or allocate
            ranks = shards.group.size
            self.size = size or evenly(self.size, ranks, min(dtype.itemsize, grad_dtype.itemsize))
            self.data, self._weights = shards.allocate(self.size, dtype)
        else:
            self.data = allocate(self.size, dtype)
        same = not trainable or (master_dtype == dtype and not has_versions)
        self._spare = allocate if shards is None else shards.allocate
        self._master = self.data if same else allocate(self.size, master_dtype) if shards is None else None
        self.grad_dtype, self.grad = grad_dtype, None
        if trainable and (shards is None or shards.keep_gradients):
            self.grad = (allocate_gradient or allocate)(self.size, grad_dtype)
        if shards is not None:
            own, gradient = self._own, None
            self._home = allocate(own.stop - own.start, dtype) if self.passes else self.data[own]
            if trainable:
                gradient = allocate(own.stop - own.start, grad_dtype) if self.grad is None else self.grad[own]
            part = self._part = self._stretch(gradient)
            if self.passes:
                self._master = None
            part._master = part.data if same else allocate(part.size, master_dtype)
        if not same and keep != "whole":
            owned = self.owned
            owned._store = CompactMasters(keep, owned.data, owned.master, owned.slots)

    @property
    def group(self) -> Group | None:
        """The ranks among which it is cut; None of a chunk that is whole."""
        return None if self._shards is None else self._shards.group

    @property
    def copy_number(self) -> int:
        """Which copy of its stretch this rank has: 0 unless several groups shard the same (hybrid sharding)."""
        return 0 if self._shards is None else self._shards.copy[0]

    @property
    def owned(self) -> Chunk:
        """What this rank owns of it: all, or its stretch."""
        return self if self._part is None else self._part

    @property
    def is_cut(self) -> bool:
        """Whether ranks own stretches of it."""
        return self._part is not None

    @property
    def _own(self) -> slice:
        """Where this rank's stretch of a chunk that is cut lies."""
        assert self.group is not None
        each = self.size // self.group.size
        return slice(self.group.rank * each, (self.group.rank + 1) * each)

    def _stretch(self, grad: Tensor | None) -> Chunk:
        """The owned stretch, with the gradient `grad`, without a master."""
        own = self._own
        parts = (slot.between(own.start, own.stop) for slot in self.slots)
        stretch = copy(self)
        stretch.slots, stretch.size = tuple(part for part in parts if part is not None), own.stop - own.start
        stretch._shards, stretch._part, stretch._master = None, None, None
        stretch.data, stretch.grad = self._home, grad
        return stretch

    def another(self) -> Tensor:
        """Storage as its data is."""
        made = self._spare(self.size, self.data.dtype)
        return made[0] if isinstance(made, tuple) else made

    def lies_in(self, data: Tensor) -> None:
        """Its data are in `data` from now on, which is as `another` gives it: updates are published there."""
        self.data = data
        if self._part is not None:
            self._home = self._part.data = data[self._own]

    @property
    def passes(self) -> bool:
        """Whether `data` has memory only between `open` and `let_go`; each rank keeps its stretch of it, `owned.data`."""
        return self.group is not None and self._weights is Weights.PASSING

    @property
    def nbytes_whole(self) -> int:
        """Bytes of the whole data while it is there."""
        return self.data.nbytes

    def open(self) -> None:
        """Makes room for the data of a chunk that passes."""
        self.data.untyped_storage().resize_(self.nbytes_whole)

    def fill(self) -> None:
        """Gathers the data of a chunk that passes; all its ranks call it."""
        assert self.group is not None
        self.settle()
        alone = self.group.size == 1
        if self.data.is_cpu and not alone:  # a few microseconds beside the transfer; on GPUs the host would have to wait
            asked = self.group.all_gather(
                torch.empty(self.group.size), torch.tensor([float(self.index)]), purpose="which weights"
            )
            if (asked != self.index).any():
                raise UserError(
                    f"ranks need different weights at the same time: chunks {[int(index) for index in asked]} ({self.slots[-1].name} is in "
                    f"{self.index}). Where weights are gathered (plan.zero = 3 without shared memory) all ranks must run the same modules in the "
                    "same order; plan.zero = 2 does not ask for that"
                )
        mine = self.owned.data
        if alone or mine.device != self.data.device:
            mine = self.data[self._own].copy_(mine, non_blocking=True)
        if not alone:
            self.group.all_gather(self.data, mine, purpose=f"weights {self.index}")

    def settle(self) -> None:
        """Returns when no update of it is under way."""
        if self.before_fill is not None:
            self.before_fill(self)

    def let_go(self) -> None:
        """Frees the memory of the data of a chunk that passes; nobody may read it any more."""
        self.data.untyped_storage().resize_(0)

    @torch.no_grad()
    def stay(self) -> None:
        """From now on the weights of a chunk that passes, and what this rank owns of gradient and masters, are on the device."""
        self.open()
        self.fill()
        self._weights = Weights.WHOLE
        owned, data = self.owned, self.data[self._own]
        if isinstance(owned._store, CompactMasters):
            owned._master = owned._store.move(data)
        elif owned.master_like is owned.data:
            owned._master = data
        else:
            owned._master = owned.master_like.to(data.device)
        owned.data = self._home = data
        if owned.grad is not None:  # kernels of the device want the masters' dtype
            owned.grad = owned.grad.to(data.device, owned.grad.dtype if data.is_cpu else owned.master_like.dtype)

    @property
    def borrows(self) -> bool:
        """Whether it keeps only its stretch of the gradient, and is lent a whole one while backward fills it."""
        return self.trainable and self.grad is None

    def with_gradient(self, flat: Tensor) -> Chunk:
        """The same chunk with `flat`, of its size, for a gradient: what an algorithm reduces of a chunk that borrows."""
        lent = copy(self)
        lent.grad, lent._part = flat, self._stretch(flat[self._own])
        return lent

    @property
    def master(self) -> Tensor:
        """What the optimizer updates, of the whole chunk; if it is cut and the masters are wider than the data, only `owned` has one."""
        assert self._master is not None, "the masters of a chunk that is cut are where it is owned"
        if self._store is not None:
            self._store.open()
        return self._master

    @property
    def master_like(self) -> Tensor:
        """The master for its dtype and place only: it may have no memory now."""
        assert self._master is not None
        return self._master

    @property
    def keeps_masters(self) -> bool:
        """Whether its masters lie in memory between updates, as they are."""
        return self._store is None

    @property
    def rest_of_masters(self) -> Tensor | None:
        """What is kept of masters beside the data, where that is less than all."""
        return self._store.rest if isinstance(self._store, CompactMasters) else None

    def kept_by(self, store: MasterStore) -> None:
        """Its masters come and go with `store` from now on."""
        self._store = store

    @property
    def lower_halves(self) -> Tensor | None:
        """Where masters rest split: the int16 that `data` lacks to the fp32 values."""
        return self._store.lower_halves if self._store is not None else None

    def rest(self, turn: int = -1) -> None:
        """Casts what is owned of the masters into the data, unless an update has done that already, and gives back the memory of those that are kept in
        less between updates."""
        owned = self.owned
        done, owned.data_is_new = owned.data_is_new, False
        if owned._store is not None:
            owned._store.close(turn, done)
        elif owned.master is not owned.data and not done:
            owned.data.copy_(owned.master)

    @classmethod
    def of_gradient(cls, index: int, slots: tuple[Slot, ...], flat: Tensor) -> Chunk:
        """A chunk whose gradient is `flat`, storage of somebody else that is laid out as `slots`; it has neither data nor master."""
        chunk = cls(index, slots, flat.dtype, flat.dtype, flat.dtype, True, lambda numel, dtype: flat)
        chunk.data = chunk._master = flat.new_empty(0)
        return chunk

    @property
    def gradient(self) -> Tensor:
        """`grad` of a trainable chunk that keeps it."""
        assert self.grad is not None, "a frozen chunk has no gradient, and one that borrows has none of its own"
        return self.grad

    def like_gradient(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros laid out as the whole gradient."""
        return torch.zeros(self.size, dtype=dtype or self.grad_dtype, device=self.data.device)

    @property
    def nbytes(self) -> int:
        """Bytes of data, gradient and master together, of what passes without what is there for a while."""
        owned = self.owned
        parts = [owned.data if self.passes else self.data, self.grad if self.grad is not None else owned.grad]
        if owned._store is None and owned._master is not owned.data:
            parts.append(owned._master)
        return sum(part.nbytes for part in parts if part is not None) + (owned._store.nbytes if owned._store is not None else 0)

    def norm_pieces(self, part: int = 0, parts: int = 1) -> list[Tensor]:
        """The gradient as flat views, for sums of squares: of a parameter's own elements only and cut by its shape alone, so that the
        norm of all does not depend on which parameters share a chunk. `part` of `parts` about even ones; of a chunk that is cut, what
        of the owned stretch this copy of it counts."""
        if self._shards is not None:
            return self.owned.norm_pieces(*self._shards.copy)
        place, places = self.beside
        part, parts = part * places + place, parts * places
        flats = [slot.view(self.gradient).view(-1) for slot in self.slots]
        pieces = [piece for flat in flats for piece in flat.split(NORM_PIECE)]
        return pieces[len(pieces) * part // parts : len(pieces) * (part + 1) // parts]

    @property
    def gaps(self) -> list[slice]:
        """Where no parameter lies: between slots, and behind them where the chunk is cut."""
        ends = [0, *(slot.offset + slot.numel for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.size]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def clear_padding(self, flat: Tensor) -> None:
        """Makes the gaps zero again in `flat`, laid out as this chunk, after something lossy has gone over all of it."""
        for gap in self.gaps:
            flat[gap].zero_()

    def reduce_scatter(self, purpose: str) -> None:
        """Of a chunk that is cut: brings the sum over all ranks of the whole gradients into their owned stretches."""
        assert self._shards is not None
        self._shards.inside.reduce_scatter(self.owned.gradient, self.gradient, purpose=purpose)
        if self._shards.across is not None:
            self._shards.across.all_reduce(self.owned.gradient, purpose=purpose)

    def agree(self) -> None:
        """Of a chunk that is cut: copies of the owned stretch, and then the weights, become those of the first."""
        if self._shards is not None and self._shards.across is not None:
            self._shards.across.broadcast(self.owned.master, purpose="weights")
        self.publish()

    def publish(self, turn: int = -1) -> None:
        """Casts the updated master into what the module sees; nothing to do where they are one. Of a chunk that is cut all ranks call it,
        and get each other's stretches, unless it passes. `turn`: of which step, where rounding draws."""
        self.rest(turn)
        self.share()

    def share(self) -> None:
        """The second half of `publish`: of a chunk that is cut the ranks get each other's stretches, unless it passes."""
        if self.group is not None and self._weights is Weights.COMMON:
            self.group.barrier()
        elif self.group is not None and self._weights is Weights.WHOLE:
            self.group.all_gather(self.data, self.owned.data, purpose=f"weights {self.index}")

    def whole_master(self) -> Tensor | None:
        """The master of the whole chunk. Of one that is cut it is gathered, if need be, on the first rank, from all, which call it alike;
        the others get None then."""
        if self._master is not None or self.group is None:
            return self.master_to_read
        mine = self.owned.master_to_read
        whole = mine.new_empty(self.size) if self.group.rank == 0 else None
        return self.group.gather(whole, mine, purpose=f"masters {self.index}")

    @property
    def master_to_read(self) -> Tensor:
        """The master, which is not to be changed: if it is on a disk, as it lies there."""
        store = self._store
        return self.master if store is None or isinstance(store, CompactMasters) else store.master


def aligned(numel: int, itemsize: int) -> int:
    """`numel` rounded up so that the next slot starts on ALIGNMENT bytes."""
    per_line = max(1, ALIGNMENT // itemsize)
    return -(-numel // per_line) * per_line


def evenly(numel: int, ranks: int, itemsize: int) -> int:
    """`numel` rounded up so that it is cut into even, aligned stretches among `ranks`."""
    return ranks * aligned(-(-numel // ranks), itemsize)


def sum_of_squares(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """The exact sum (see exact) of the squares of the norms of `pieces`."""
    if not pieces:
        return torch.zeros(DIGITS, dtype=torch.float64, device=device)
    if pieces[0].dtype == torch.bfloat16:  # whose norms would be rounded to it
        norms = [torch.linalg.vector_norm(piece.float()) for piece in pieces]
    else:
        norms = list(torch._foreach_norm(list(pieces)))
    return exact_sum(torch.stack(norms).double().square()).to(device)

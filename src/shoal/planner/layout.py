"""The chunks that an engine would make, without making them: who owns what of them, in elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.chunks import ChunkKey, Slot, search
from shoal.chunks.assign import Described, assign, lay_out
from shoal.chunks.make import EXPERTS
from shoal.plan import Plan
from shoal.precision import Precision


@dataclass(frozen=True)
class Place:
    """Where a rank stands. `together`: ranks that share one copy of the state, `with_experts`: those of them that have
    the same experts; `on_host`: ranks of its host. `one_memory`: ranks put common weights and gradients on loan in
    memory that all see. `on_gpu`: the device is one, and its memory another than the host's. `budget`: bytes of the
    device that weights and all else may take, None for no limit."""

    rank: int = 0
    together: int = 1
    on_host: int = 1
    one_memory: bool = True
    on_gpu: bool = False
    budget: int | None = None
    with_experts: int = 1

    def sharers(self, key: ChunkKey) -> int:
        """The ranks that share one copy of a chunk's state."""
        return self.with_experts if key.group == EXPERTS else self.together


@dataclass(frozen=True)
class Laid:
    """A chunk of `size` elements. `is_cut`: a rank owns an even stretch of it, `owned` elements with the parameters
    `own`. `passes`: its weights are whole only while they are used. `borrows`: so are its gradients while backward
    fills them."""

    key: ChunkKey
    slots: tuple[Slot, ...]
    size: int
    is_cut: bool
    owned: int
    own: tuple[Slot, ...]
    passes: bool
    borrows: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weights."""
        return self.size * self.key.dtype.itemsize


def passes(plan: Plan, place: Place) -> bool:
    """Whether weights that are cut are whole only while they are used."""
    return plan.memory is not None or (plan.zero == 3 and place.together > 1 and (place.on_gpu or not place.one_memory))


def chosen_chunk(
    parameters: Sequence[Described],
    plan: Plan,
    place: Place,
    precision: Precision,
    whole: bool,
    given: int | None,
    usual: int,
    in_turn: int = 0,
) -> int:
    """Bytes of gradient of a chunk as the engine chooses them; `given` by the user, `usual` where the exchange
    decides; `in_turn`: bytes for what is updated in turn (see chunks.search)."""
    if given is not None or not passes(plan, place):
        return given or usual
    ranks = place.together if plan.zero else 1
    return search(parameters, ranks, precision.grad.itemsize, whole, place.budget, in_turn).best.chunk_bytes


def lay_out_all(
    parameters: Sequence[Described], plan: Plan, place: Place, precision: Precision, whole: bool, chunk_bytes: int
) -> list[Laid]:
    """The chunks of about `chunk_bytes` of gradient. `whole`: the optimizer takes whole parameters."""
    stage = 3 if plan.memory is not None else plan.zero
    laid = []
    for key, slots in assign(parameters, chunk_bytes, precision.grad.itemsize):
        ranks = place.sharers(key) if plan.zero else 1
        sharded = ranks > 1 or plan.memory is not None
        is_cut = sharded and not key.sparse and (key.trainable or stage == 3)
        size = slots[-1].offset + slots[-1].numel
        if is_cut:
            slots, size = lay_out(slots, ranks, min(key.dtype.itemsize, precision.grad.itemsize), whole)
        owned = size // ranks if is_cut else size
        start = owned * (place.rank % ranks) if is_cut else 0
        own = (
            tuple(part for slot in slots if (part := slot.between(start, start + owned)) is not None)
            if is_cut
            else slots
        )
        goes = is_cut and passes(plan, place)
        laid.append(Laid(key, slots, size, is_cut, owned, own, goes, is_cut and key.trainable and stage >= 2))
    return laid

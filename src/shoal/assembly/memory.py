"""Where the model lies: its parameters in chunks, cut and sized as the exchange and the links want them, at home in the
tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from shoal.assembly.compatibility import check_exchange
from shoal.assembly.model import Local, anywhere
from shoal.assembly.offload import Offload
from shoal.assembly.recipe import Recipe
from shoal.assembly.storage import Storage
from shoal.chunks import Chunk, ChunkMaker, Gather, adopt
from shoal.chunks.adopt import let_go
from shoal.chunks.allocate import Private
from shoal.chunks.make import Keeping, groups_of
from shoal.comm import Link
from shoal.comm.links import link_of
from shoal.errors import UserError
from shoal.exchange import Algorithm
from shoal.exchange.apart import with_variants
from shoal.exchange.tuning import chunk_bytes, worth_measuring
from shoal.module.stand_in import forget_parts
from shoal.optim.groups import needs_whole_parameters, small_optimizer, state_keys
from shoal.optim.tiers.disk import Disk
from shoal.optim.tiers.pager import Pager
from shoal.precision import Precision


@dataclass(frozen=True)
class Memory:
    """The chunks of a model, and who moves them.

    `exchange`: the algorithm that was chosen, since it says how gradients lie. `precision`: with the dtype of the
    gradients.
    `maker`: makes chunks of about `chunk_bytes` of gradient, chosen for `link` where that was measured.
    `chunks`: what parameters lie in; after the first step they may be cut anew (see `rebuild`), in this list.
    `recut`: whether that may be, since the order in which gradients come was only expected.
    `parameters[name]`: the module's parameters, views of the chunks.
    `gather` brings weights that are whole only while they are used; `pager` what lies on a disk or is streamed.
    `offload`, `pager`, `gather`, `link`: None where there is no need of them.
    """

    exchange: Algorithm
    precision: Precision
    offload: Offload | None
    storage: Storage
    maker: ChunkMaker
    chunk_bytes: int
    link: Link | None
    recut: bool
    chunks: list[Chunk]
    pager: Pager | None
    parameters: dict[str, nn.Parameter]
    gather: Gather | None

    @property
    def trainable(self) -> list[Chunk]:
        """The chunks of parameters that are trained."""
        return [chunk for chunk in self.chunks if chunk.trainable]


def lay_out(
    local: Local,
    recipe: Recipe,
    microbatch: int,
    undo: ExitStack,
    fill: bool = True,
    disk: Callable[[Path, int | None], Disk] = Disk,
) -> Memory:
    """Puts the model of `local` onto its storage, with the values that it begins with. All ranks call it alike.

    microbatch: samples a forward
    undo: gets what is to be closed if it, or a later phase, refuses
    fill: False leaves the weights without values, for a run that brings its own
    disk: makes the disk of a directory, of which the rank may take so many bytes

    Raises UserError for an exchange or a memory that does not go with the rest of the plan, and StorageError for a disk
    that cannot be used, on all ranks alike.
    """
    ranks, plan, device = local.ranks, local.ranks.plan, local.ranks.world.device
    replicas, parts = ranks.replicas, ranks.parts
    precision, optimizer, options = recipe.precision, recipe.optimizer, local.whole.groups.options

    offload = None if plan.memory is None else Offload(plan, ranks.world, replicas, ranks.everyone, disk)
    small = partial(small_optimizer, optimizer, options)
    chosen = check_exchange(plan, precision.keep, recipe.clip_value, small, local.parallelized.moves_biases)
    exchange = with_variants(chosen, plan.exchange, local.apart, ranks.among)
    storage = Storage(plan, ranks.mesh, ranks.world, replicas, local.apart, ranks.stage, offload, local.tied)
    keeping, apart = storage.keeping(exchange, partial(needs_whole_parameters, optimizer, options, precision.master))
    if offload is not None and not _uses_gradients(local, recipe):
        once = recipe.global_batch <= microbatch
        precision = offload.narrow_gradients(local.module, precision, optimizer, options, once)
    maker = _maker(local, precision, {"": keeping, **apart})
    sized = storage.chunk_bytes(exchange, maker, keeping.shards, precision, partial(state_keys, optimizer, options))
    gradient_bytes = parts.broadcast_object(maker.gradient_bytes)
    measured = sized is None and worth_measuring(exchange, gradient_bytes, replicas.size)
    link = link_of(replicas, device) if measured else None
    size = parts.broadcast_object(sized or chunk_bytes(exchange, gradient_bytes, link))
    size = ranks.stages.broadcast_object(size)  # what is tied lies in chunks of one size
    cut = maker.cut(size)
    chunks = maker.make(cut if parts.size == 1 else maker.cut_like(cut, parts))
    pager = offload.pages(chunks, optimizer, options, precision) if offload is not None else None
    if pager is not None:
        undo.callback(pager.close)
    parameters = adopt(local.module, chunks, local.built.value, precision, device, fill)
    undo.callback(let_go, parameters)
    forget_parts(local.module)  # here and below, else weights would be kept beside those that are trained
    for built in (local.built, local.whole.built):
        built.forget()
    gather = storage.gather(local.module, chunks)
    if gather is not None and local.recompute is not None:
        local.recompute.again.append(gather.again)
    storage.agree_on_buffers(local.module)
    if fill:
        storage.agree(chunks, parts)
    recut = measured and keeping.shards is None and ranks.stages.size == 1
    memory = Memory(exchange, precision, offload, storage, maker, size, link, recut, chunks, pager, parameters, gather)
    if not anywhere(local.axes, bool(memory.trainable)):
        raise UserError("the model has no parameter with requires_grad: there is nothing to train")
    return memory


def _maker(local: Local, precision: Precision, keeping: Mapping[str, Keeping]) -> ChunkMaker:
    """Makes what cuts the model into chunks, which are kept so; each stage of this rank has its own."""
    parts = local.ranks.parts
    maker = ChunkMaker(
        local.module,
        local.whole.groups.member,
        precision,
        Private(local.ranks.world.device),
        keeping,
        groups_of(local.layouts),
        (parts.rank, parts.size),
        not local.flushes,
    )
    if local.pipeline is not None:
        maker.by_stage(local.pipeline.names)
    return maker


def _uses_gradients(local: Local, recipe: Recipe) -> bool:
    """Whether gradients are changed on their way to the update, or kept, which bf16 would round."""
    by_function = callable(recipe.clip) or recipe.clip_value is not None
    return by_function or recipe.keep_gradients or bool(local.whole.hooked)

"""The engine: how one model and a plan become a running job. `__init__` is the assembly, in its fixed order."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal import checkpoint
from shoal.assembly.arguments import check_arguments, check_batch, check_dataset
from shoal.assembly.offload import Offload
from shoal.assembly.parts import Parts
from shoal.assembly.storage import Storage
from shoal.checkpoint import state
from shoal.checkpoint.extra import read_extra
from shoal.checkpoint.given import Given
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.whole import of_all_stages, whole_parameters
from shoal.chunks import Chunk, ChunkMaker, adopt, move, weakly
from shoal.chunks.allocate import Private, Shared
from shoal.chunks.make import groups_of
from shoal.chunks.versions import Versions
from shoal.comm import Group, Lane, World
from shoal.data import Batch, Cursor, IterableSource, map_batches
from shoal.data.loader import Collate, Order
from shoal.errors import CheckpointError, UserError
from shoal.exchange import Holds, Replica
from shoal.exchange.apart import check_biases
from shoal.exchange.choose import choose_exchange
from shoal.exchange.hooks import UserHooks, check_hooks, is_hooked
from shoal.exchange.kept import from_older
from shoal.exchange.mean import mean_of_optimizers, mean_of_replicas
from shoal.exchange.rows import row_by_row
from shoal.exchange.tuning import chunk_bytes, worth_measuring
from shoal.launch import join
from shoal.mesh import Mesh
from shoal.models.export import export_whole
from shoal.models.generate import generate
from shoal.module.alike import make_alike
from shoal.module.batchnorm import synchronise
from shoal.module.buffers import OtherBuffers
from shoal.module.build import build
from shoal.module.compiling import blocks, compile_blocks, nothing_to_recompute, recomputable
from shoal.module.random import Randomness, attention
from shoal.module.recompute import Recompute, without_caches
from shoal.native.heap import keep_freed_memory
from shoal.optim.lr import Course, Schedule
from shoal.optim.optimizer import (
    ChunkOptimizer,
    GroupRule,
    OptimizerFactory,
    group_options,
    needs_whole_parameters,
    small_optimizer,
)
from shoal.optim.tiers.deferred_update import Later
from shoal.parallel.parallelized import Parted
from shoal.parallel.tensor import CutLayers, Rules, check_rules
from shoal.pipeline import Whole, cut_into_stages, delay, samples_to_fill
from shoal.plan import Plan, option_name
from shoal.precision import LossScale, cast_at_the_border, set_products
from shoal.precision import precision as precision_named
from shoal.training.evaluation import Evaluation, evaluate
from shoal.training.loop import Loop
from shoal.training.loss import Loss
from shoal.training.no_flush import Unflushed, check_unflushed
from shoal.training.norms import ClipRule, check_by_name, whole_gradients
from shoal.training.objective import Objective
from shoal.training.result import StepResult
from shoal.training.step import StepRunner, choose_microbatch, no_fixed_cut

FAR = 10**9
"""A step by which an exchange does what it comes to in the end."""


class Engine:
    """Trains `model`, written for one device, on the ranks of `world` as `plan` says.

    `model`: a factory without arguments, or a ready module. `loss(model, microbatch)` returns (sum, count) or (sum, count, {name:
    auxiliary mean}). `optimizer` takes a list of parameter groups, e.g. `partial(torch.optim.AdamW, lr=3e-4)`. `plan`: by default data
    parallel over all ranks. `global_batch`: samples a step. `microbatch`: samples a forward; None takes a rank's whole share, of a pipeline so few that its ranks seldom wait, and must
    be given where the model has batch-wide statistics. `precision`: "fp32", "tf32", "fp64", "bf16", "fp16", "fp8",
    or a table with its parameters (see `precision`). `clip`: largest norm of the global gradient, or a function that gets the norms by name and gives a factor, or factors by name; `clip_value`: largest
    absolute value of each of its elements.
    `schedule(optimizer)` gives a torch LRScheduler, stepped once a step. `param_groups(name, parameter)` gives options of the
    parameter's group. `tensor_rules`: how a model's layers are cut for `plan.tp`, beside what is known (see parallel.tensor.rules). `sync_bn`: BatchNorm statistics
    over the global batch. `dropout`: "keyed" (any plan drops the same) or "fused"
    (torch's own kernels; depends on the plan). `buffers`: of those that forwards write, and that several ranks cannot have as one process would: "exact" refuses
    them, "averaged" makes them the mean over microbatches. `keep_gradients`: for `gradients()`. `norms_every`: so many steps the result has `norms` by name, 0 for never. `world`: by default what the launcher's variables say.

    Raises UserError for what does not fit together.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        optimizer: OptimizerFactory,
        plan: Plan | None = None,
        *,
        global_batch: int,
        microbatch: int | None = None,
        precision: str | Mapping[str, Any] = "fp32",
        seed: int = 0,
        clip: float | ClipRule | None = None,
        clip_value: float | None = None,
        schedule: Schedule | None = None,
        param_groups: GroupRule | None = None,
        tensor_rules: Rules | None = None,
        sync_bn: bool = False,
        dropout: str = "keyed",
        buffers: str = "exact",
        keep_gradients: bool = False,
        norms_every: int = 0,
        collate: Collate | None = None,
        world: World | None = None,
    ) -> None:
        check_arguments(locals())
        self.world = world or join()
        self.plan = plan or Plan(dp=self.world.size)
        self._mesh, self._serial = Mesh(self.plan, self.world.rank, self.world.size), self.world.serial("engine")
        self.device, self.ledger = self.world.device, self.world.ledger
        if buffers not in ("exact", "averaged"):
            raise UserError(f'buffers = "{buffers}": "exact" refuses what ranks cannot have as one process would, "averaged" takes the mean')
        self.precision, self.seed, self.global_batch = precision_named(precision), seed, global_batch
        cp = self.plan.cp > 1
        group = self._group = self.world.group("dp-cp" if cp else "dp", self._mesh.ranks("dp", "cp"))
        beside = self._beside = self.world.group("tp", self._mesh.ranks("tp"))
        self._stage = group if beside.size == 1 else self.world.group("dp-cp-tp", self._mesh.ranks("dp", "cp", "tp"))
        self._all = self._stage if self.plan.pp == 1 else self.world.everyone

        if self.device.type == "cpu":
            keep_freed_memory()
        built = build(model, seed)
        make_alike(built, self.world.everyone)
        hooked = [name for name, parameter in built.module.named_parameters() if is_hooked(parameter)]
        options, member = group_options(built.module.named_parameters(), param_groups)
        self._randomness = Randomness(seed, self.device)
        self._check_cut(optimizer, options, sync_bn)
        check_rules(built.module, tensor_rules or {})
        self.microbatch = choose_microbatch(
            microbatch, global_batch, self.plan.dp, built.module, sync_bn, partial(samples_to_fill, self.plan)
        )
        self._even = microbatch is None or sync_bn
        pipeline = self._pipeline = cut_into_stages(built, self.plan, self._mesh, self.world) if self.plan.pp > 1 else None
        elsewhere = [] if pipeline is None else pipeline.split.elsewhere
        parted = self._parted = Parted(built, self.plan, self._mesh, self.world, tensor_rules, attention, elsewhere)
        built, self.layouts = parted.built, parted.layouts
        check_hooks(hooked, self.layouts, self.plan)
        self._apart = {} if parted.experts is None else {"experts": parted.experts}
        unflushed = pipeline is not None and not pipeline.flushes
        if pipeline is not None:
            pipeline.split.between = [] if parted.region is None else [parted.region]
            pipeline.split.within = [] if parted.context is None else [parted.context]
        tied = self._tied()
        if unflushed:
            check_unflushed(self.plan, self.precision, parted, group.size, sync_bn, bool(pipeline and pipeline.tied))
        self.module, self.build_note = built.module, built.how
        without_caches(self.module)
        if sync_bn:
            synchronise(self.module, self.world.group("dp-batchnorm", self._mesh.ranks("dp")))
        if parted.parts is not None:
            self._randomness.part = parted.parts
        if parted.context is not None:
            self._randomness.attend = parted.context.attend
        self._loss, self._collate = loss, collate
        self._source: IterableSource | dict[str, Any] | None = None
        self._keyed = dropout == "keyed"
        if self._keyed:
            repeated = blocks(self.module)
            self._randomness.take_over(self.module, repeated if repeated != [self.module] else [])
        elif dropout != "fused":
            raise UserError(f'dropout = "{dropout}": "keyed" drops the same under every plan, "fused" uses torch\'s kernels')
        self._randomness.keyed = self._keyed
        set_products(self.module, self.precision, self.device)
        if self.plan.compile:
            compile_blocks(self.module, self.plan.compile)
        self._recomputing = self._recompute()
        cast_at_the_border(self.module, self.precision)

        self._offload = None if self.plan.memory is None else Offload(self.plan, self.device, group, self._all, self.ledger)
        small = partial(small_optimizer, optimizer, options)
        exchange = self._exchange = choose_exchange(self.plan, self.precision.keep, clip_value, self._apart, self._among, small)
        if parted.moves_biases:
            check_biases(exchange, self.plan.exchange)
        storage = self._storage = Storage(self.plan, self._mesh, self.world, group, self._apart, self._stage, self._offload, tied)
        whole = partial(needs_whole_parameters, optimizer, options, self.precision.master)
        keeping, apart = storage.keeping(exchange, whole)
        if self._offload is not None and clip_value is None:
            once = global_batch <= self.microbatch
            self.precision = self._offload.narrow_gradients(self.precision, optimizer, options, once)
        private, groups, place = Private(self.device), groups_of(self.layouts), (beside.rank, beside.size)
        self._maker = ChunkMaker(self.module, member, self.precision, private, keeping, apart, groups, place, unflushed)
        sized = storage.chunk_bytes(exchange, self._maker, keeping.shards, self.precision.grad.itemsize)
        gradient_bytes = beside.broadcast_object(self._maker.gradient_bytes)
        measured = sized is None and worth_measuring(exchange, gradient_bytes, group.size)
        self._link = group.link(self.device) if measured else None
        self._chunk_bytes = beside.broadcast_object(sized or chunk_bytes(exchange, gradient_bytes, self._link))
        if pipeline is not None:  # what is tied lies in chunks of one size
            self._chunk_bytes = pipeline.group.broadcast_object(self._chunk_bytes)
        cut = self._maker.cut(self._chunk_bytes)
        self._versions: Versions | None = None
        self._chunks = self._maker.make(cut if beside.size == 1 else self._maker.cut_like(cut, beside))
        self._pager = self._offload.pages(self._chunks, optimizer, options, self.precision) if self._offload else None
        self.parameters = adopt(self.module, self._chunks, built.value, self.precision, self.device)
        self._passing, tally = storage.passing(self.module, self._chunks), parted.tally()
        if self._passing is not None and self._recomputing is not None:
            self._recomputing.again.append(self._passing.again)
        storage.agree(self.module, self._chunks, beside)

        trainable = [chunk for chunk in self._chunks if chunk.trainable]
        if not self._on_any_stage(bool(trainable)):
            raise UserError("the model has no parameter with requires_grad: there is nothing to train")
        offload = self._offload
        chunkwise = offload is not None and offload.chunkwise
        later = Later(self.ledger) if offload is not None and offload.update == "deferred" else None
        self.optimizer = ChunkOptimizer(
            optimizer, trainable, self.parameters, options, member, clip_value, self._pager, chunkwise, later
        )
        self.optimizer.settled = weakly(self._commit)
        self.scheduler = schedule(self.optimizer.torch) if schedule else None
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UserError(
                "ReduceLROnPlateau needs a metric at each step, which the engine does not have: lower the lr from your own loop"
            )
        clipped: Any = getattr(clip, "__qualname__", "a function") if callable(clip) else clip
        settings = {"global_batch": global_batch, "seed": seed, "precision": self.precision.name, "clip": clipped, "clip_value": clip_value}
        self._given = Given(self.optimizer, Course(self.scheduler) if self.scheduler else None, settings)
        for chunk in trainable:
            chunk.rest()
        self._lane = Lane(self.device, self.ledger)
        self._lender = self._maker.lender(trainable, Shared(group, self.device), None if offload is None else offload.tier)
        by_tokens = any("tp" in layout.reduce for layout in self.layouts.values())
        tokens = self.world.group("tp-gradients", beside.ranks) if by_tokens else None
        deciding = self.world.group("tp-decisions", beside.ranks) if beside.size > 1 else None
        exchange.attach(
            Replica(trainable, group, self._lane, self.optimizer, partial(self._among, group), self._lender, tokens, deciding)
        )
        alike = exchange.holds(0) in (Holds.SUM, Holds.MEAN) and not exchange.drifts(FAR)
        by_name = {"clip by a function": callable(clip), "keep_gradients": keep_gradients, "norms_every": norms_every}
        for what, wanted in by_name.items():
            if wanted:
                check_by_name(what, self.plan, unflushed, alike)
        self._order_is_open = measured and len(trainable) > 1 and keeping.shards is None and pipeline is None
        self.loss_scale = LossScale(self.precision.scaling, self.device) if self.precision.scaling else None
        serial = self._serial
        make = StepRunner if not unflushed else partial(Unflushed, **self._without_flush(trainable, serial))
        self._runner = make(
            self.module,
            loss,
            self.optimizer,
            self.scheduler,
            self.parameters,
            exchange,
            self._randomness,
            group,
            microbatch=self.microbatch,
            whole=sync_bn,
            even=self._even,
            clip=clip,
            keeps=keep_gradients,
            norms_every=norms_every,
            layouts=self.layouts,
            device=self.device,
            keyed=self._keyed,
            users=UserHooks(self.parameters, self.layouts, self.plan),
            buffers=OtherBuffers(self.module, exchange.partners.size, buffers == "averaged", no_fixed_cut(microbatch, sync_bn)),
            passing=self._passing,
            scale=self.loss_scale,
            beside=beside if not unflushed else self.world.group(f"tp-ballot{serial}", beside.ranks),
            context=parted.context,
            tally=tally,
            alike=self._alike,
            shares_routing=tally is not None and parted.losses_of_all_tokens,
            stages=pipeline,
            across=self._across if not unflushed else self.world.group(f"pp-ballot{serial}", self._mesh.ranks("pp")),
            by_rows=row_by_row(self.module, blocks(self.module) if self.plan.compile else (), self.device),
        )
        self._writers: dict[Path, checkpoint.Writer] = {}
        self.step_index = 0
        self.run = ""

    def __repr__(self) -> str:
        elements = sum(math.prod(layout.shape) for layout in self.layouts.values())
        plan = ", ".join(f"{key}={value!r}" for key, value in self.plan.to_dict().items())
        return f"Engine({type(self.module).__name__} of {elements:,} parameters, Plan({plan}), {self.precision.name}, step {self.step_index}, {self.world})"

    def batches(
        self, dataset: Any, *, steps: int | None = None, epochs: int | None = None, cursor: Order | None = None
    ) -> Iterator[Batch]:
        """The global batches from the engine's step on: `steps` of them, or up to the end of `epochs`, or without end.

        A map-style dataset is read in an order that depends on seed and step alone, each sample once an epoch; the epoch's last batch
        is short. Another order of it may be given as `cursor`, such as `data.BalancedCursor`. An iterable is read by rank 0 and dispatched; its place is saved in checkpoints.
        """
        check_dataset(dataset, indexed=False)
        for batch in islice(
            self._endless(dataset, epochs, cursor), steps
        ):  # never asks for one more: an iterable's place would move on
            if epochs is not None and batch.epoch >= epochs:
                return
            yield batch

    def _endless(self, dataset: Any, epochs: int | None, cursor: Order | None) -> Iterator[Batch]:
        if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            cursor = cursor or Cursor(len(dataset), self.global_batch, self.seed)
            return map_batches(dataset, cursor, self.step_index, self._collate)
        if cursor is not None:
            raise UserError("cursor= orders a map-style dataset; this one is an iterable, which comes as it comes")
        if not isinstance(self._source, IterableSource) or self._source.iterable is not dataset:
            source = IterableSource(dataset, reads=self._all.rank == 0)
            if isinstance(self._source, dict):
                source.load_state_dict(self._source)
            self._source = source
        return self._source.batches(self.global_batch, dispatch=self._all.broadcast_object, epochs=epochs, collate=self._collate)

    def step(self, batch: Batch) -> StepResult:
        """Trains on one global batch. The result is lazy and the same on every rank.

        Raises TrainingError on a loss or gradient that is not finite; weights, optimizer and BatchNorm's statistics then are those of
        the step before.
        """
        check_batch(batch, self.step_index)
        result = self._runner.run(batch)
        self._stepped()
        return result

    def settle(self) -> None:
        """Ends what the exchange does in the background, until the next step. All ranks call it, each after its last step, before they meet in a collective of the program's:
        where ranks need not be at the same step (async_average), others would wait for this one in a round of averaging, and it for them."""
        self._exchange.settle()

    def gradients(self) -> dict[str, Tensor]:
        """The last step's by name, after the exchange and before clipping, in the unit of the mean loss; whole where plan.zero cuts them, of a model that is cut this rank's
        part. All ranks call it alike. UserError without `keep_gradients`, which costs a copy a step, or before the first step."""
        if not self._runner.gradients:
            raise UserError("no gradients are kept: give Engine(keep_gradients=True), and ask after a step")
        found = whole_gradients(self._exchange.replica.chunks, self._runner.gradients)
        return {name: found[name] for name in self.parameters if name in found}

    def loop(self, microbatches: int = 1) -> Loop:
        """The engine's steps for a loop that the caller owns, `microbatches` of it a step and rank; ranks among whom a model is cut (plan.tp) are to be given the same. UserError for more than its `global_batch` has, where
        that has decided how gradients are kept."""
        if microbatches > 1 and self.precision.grad == torch.bfloat16:
            raise UserError(
                f"loop({microbatches}): gradients of several microbatches are sums, which bf16 would round: give the engine global_batch = "
                f"{microbatches} x microbatch"
            )
        if self._pipeline is not None:
            raise UserError(
                "plan.pp > 1 runs forwards and backwards by a schedule: train with engine.step, not with a loop of your own"
            )
        if self._parted.context is not None:
            raise UserError(
                "plan.cp > 1 shares out the tokens of batches that the engine loads: train with engine.step, not with a loop of your own"
            )
        passing, group = self._passing, self._group
        places = [group.ranks.index(rank) for rank in self._exchange.partners.ranks]
        joined = None if self._alike or self._runner.whole else partial(self._among, group, "join", range(group.size))
        return Loop(
            self.module, self._runner, self._randomness, passing, group, microbatches, lambda: self.step_index, self._stepped, places, joined
        )

    def _stepped(self) -> None:
        self.step_index += 1
        if self._offload is not None:
            if not self._exchange.state():  # which would be lost
                self._offload.note(self.module, lambda: {**self._place(), "run": self.run}, self._pager)
            self.optimizer.end_of_step()
            if self._passing is not None and self._offload.use_the_device(self._chunks, self._passing, self.optimizer):
                self._runner.follow()
        if self._recomputing is not None:
            self._recomputing.decide(self._stage.broadcast_object)
        if self._order_is_open:
            self._order_chunks()

    def _order_chunks(self) -> None:
        """Once, after the first step: cuts the chunks in the order in which gradients came, if they leave enough earlier so. Nothing that
        is computed changes."""
        self._order_is_open = False
        self._runner.gradients = []
        order = self._runner.arrivals if self._maker.better(self._chunk_bytes, self._runner.arrivals) is not None else None
        order = self._stage.broadcast_object(order)
        if order is None:
            return
        cut = self._maker.cut_like(self._maker.cut(self._chunk_bytes, order), self._beside)
        self._runner.settle()
        self._exchange.settle()
        self._exchange.close()
        kept = {name: {key: each.clone() for key, each in part.tensors.items()} for name, part in self._exchange.state().items()}
        new = self._maker.make(cut)
        move(self.parameters, self.optimizer.parameters, self._chunks, new)
        self._chunks, trainable = new, [chunk for chunk in new if chunk.trainable]
        self.optimizer.follow(trainable)
        self._exchange.attach(replace(self._exchange.replica, chunks=trainable))
        for name, part in self._exchange.state().items():
            for key, each in part.tensors.items():
                each.copy_(kept[name][key])
        self._exchange.restored()
        self._runner.follow()

    def evaluate(self, dataset: Any, *, max_batches: int | None = None, measure: Loss | None = None) -> Evaluation:
        """Mean loss over a map-style dataset in evaluation mode, or over its first `max_batches` global batches; of another `measure` than the engine's loss,
        which returns (sum, count) as that does."""
        check_dataset(dataset, indexed=True)
        self._runner.flush()
        samples = min(len(dataset), (max_batches or len(dataset)) * self.global_batch)
        of_all = (self.module, measure or self._loss, dataset, samples, self.microbatch, self._collate, self._group, self.device)
        with self._as_one():
            draws = (self._randomness, self._keyed)
            return evaluate(*of_all, *draws, self._passing, self._parted.context, self._alike, self._pipeline, self._even)

    def generate(
        self, ids: torch.Tensor, max_new_tokens: int, *, temperature: float = 1.0, top_k: int | None = None, seed: int | None = None
    ) -> torch.Tensor:
        """Token ids [B, T], the same on every rank, continued to [B, T + max_new_tokens] by a model that predicts the next token (see `models.generate`); under any
        plan, all ranks call it alike and get the same. `seed`: of the draws, by default the engine's."""
        draw = torch.Generator(self.device).manual_seed(self.seed if seed is None else seed)
        # compiled blocks would be compiled anew for each length
        with self._as_one(), self.whole_weights(), torch.compiler.set_stance("force_eager"):
            return generate(self.model, ids.to(self.device), max_new_tokens, temperature, top_k, draw)

    def _drifted(self) -> bool:
        """Whether the replicas differ now; ends the exchange's background work for the moment."""
        self._exchange.settle()
        return self._group.size > 1 and self._exchange.drifts(self.step_index)

    def _as_one(self) -> AbstractContextManager[None]:
        """Inside, replicas that have drifted apart are their mean."""
        return mean_of_replicas(self.module, self._chunks, self._group) if self._drifted() else nullcontext()

    def whole_weights(self) -> AbstractContextManager[None]:
        """Inside, the module's parameters can be read, also where each rank keeps only a stretch of them (`plan.zero = 3` without shared
        memory; outside they show NaN there). All ranks call it alike, between steps."""
        return nullcontext() if self._passing is None else self._passing.whole()

    @property
    def model(self) -> nn.Module:
        """The model, to be called without gradients: `module`, or where it is cut into stages all of them, whose ranks call it alike and get the same."""
        if self._pipeline is None:
            return self.module
        return Whole(self._pipeline, self._group if self._alike else None, self._runner.flush)

    def objective(self, batch: Batch) -> Objective:
        """The mean loss of a global batch as a pure function of the parameters, for `torch.func`: grad, jvp and products with the
        Hessian pass through its collectives and equal one process. All ranks must call it alike."""
        if self._pipeline is not None:
            raise UserError("plan.pp > 1: no rank has all parameters, of which the objective is a function")
        randomness = self._randomness if self._keyed or self._parted.context is not None else None
        experts = self._parted.experts or self._group
        groups = {
            name: experts if layout.of_experts else self._stage if "tp" in layout.reduce else self._group
            for name, layout in self.layouts.items()
        }
        return Objective(self.module, self._loss, self._runner, batch, randomness, self._group, groups, self._alike)

    def save(self, directory: str | Path, *, wait: bool = True, keep: int = 3, extra: Mapping[str, Any] | None = None) -> None:
        """Writes `directory/step-XXXXXXXX`; all ranks call it. `wait=False` returns once the state is copied, unless a part of it lies on the disk of
        `plan.memory`: then there is no memory for a copy. Raises CheckpointError if this save (or, without waiting, the one before) failed; the last
        good checkpoint stays."""
        self._runner.flush()
        self._runner.settle()
        self.optimizer.settle()
        path = Path(directory).resolve()
        if path not in self._writers:
            self._writers[path] = checkpoint.Writer(path, self.world, keep)
        copy = self._pager is None or self._pager.disk is None
        extra = {**self._extra(), "user": dict(extra or {})}
        self._writers[path].save(self.step_index, self._pieces(), extra, wait or not copy, copy)

    def _pieces(self) -> list[Piece]:
        """What this rank writes: its share of what all replicas have alike (or of their mean), and what only it has."""
        standing = self._standing
        states = {name: kept.tensors for name, kept in self._exchange.state().items()}
        own = state.exchange_pieces(states, standing)
        if (versions := self._versions) is not None:
            own += state.version_pieces({versions.newest - each: versions.tensors(each) for each in versions.kept}, standing)
        if not self._drifted():
            return own + state.pieces(self.module, self._chunks, self.optimizer, standing)
        own += [_copied(piece) for piece in state.replica_pieces(self.module, self._chunks, self.optimizer, standing)]
        means = mean_of_optimizers(self.optimizer, self._group)
        with mean_of_replicas(self.module, self._chunks, self._group):
            pieces = state.pieces(self.module, self._chunks, self.optimizer, standing, means)
            return own + [_copied(piece) for piece in pieces]

    @property
    def _standing(self) -> state.Standing:
        beside = {"experts": self._parted.beside, "tied": self._beside}
        apart = {
            kind: state.Standing(self.layouts, group.rank, group.size, beside[kind].rank, beside[kind].size)
            for kind, group in self._apart.items()
        }
        silent = frozenset[str]()
        if self._pipeline is not None and not self._pipeline.is_last:
            silent = frozenset(f"buffer.{name}" for name in self._pipeline.split.common_buffers)
        mine, parts = self._group, self._beside
        return state.Standing(self.layouts, mine.rank, mine.size, parts.rank, parts.size, apart, silent)

    def _extra(self) -> dict[str, Any]:
        return {
            "replicas": self._group.size if self._drifted() else None,
            **self._place(),
            **state.optimizer_extra(self.optimizer, self._group if self.plan.zero else None, self._across),
        }

    def _place(self) -> dict[str, Any]:
        """Where the run is, but for tensors and the optimizer."""
        return {
            "step": self.step_index,
            "seed": self.seed,
            "global_batch": self.global_batch,
            "precision": self.precision.name,
            "plan": self.plan.to_dict(),
            "per_sample": self._runner.per_sample,
            "kept_of_mean": True,  # the unit of what exchanges keep back
            "loss_scale": self.loss_scale.state() if self.loss_scale else None,
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "source": self._source.state_dict() if isinstance(self._source, IterableSource) else self._source,
            "given": self._given.record,
        }

    def _commit(self) -> None:
        if self._offload is not None and self._pager is not None:
            self._offload.commit(self.optimizer, self._pager)

    def recover(self, after: int = -1) -> bool:
        """Goes on from the last update that all ranks have on the disk of `plan.memory`, if there is one of this model and plan, of the run `engine.run`
        (a name of any kind), of a step later than `after`; returns whether. All ranks call it alike, before the first step.

        For a run that was killed: no update is lost. There is one where the optimizer's side of all chunks lies on the disk. Frozen parameters are what the
        model was built with.
        """
        if self._pager is None or not self._pager.durable or self.step_index:
            return False
        generation = self._pager.generation - 1
        if generation == 0:
            return False
        extra, tensors = self._pager.read(generation)
        if extra["step"] <= after or extra["run"] != self.run:
            return False
        state.restore_small(self.module, self.optimizer, tensors, extra)
        self._pager.recall(generation)
        self._go_on(extra)
        return True

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Reads a checkpoint written under any plan: one `step-...`, or the newest good one in `directory`. Returns its user `extra`."""
        path = Path(directory)
        if not path.name.startswith("step-"):
            path = self._newest(path)
        self._runner.flush()
        self._exchange.settle()
        self.optimizer.settle()
        if self._pager is not None:
            self._pager.uncommit()
        rank, size = self._group.rank, self._group.size
        # Replicas that had drifted apart go on as they were if there are as many and they still may differ, else all from their mean.
        saved = read_extra(path)
        own = f"replica.{rank}." if saved.get("replicas") == size and self._exchange.drifts(saved["step"]) else ""
        extra = state.restore(path, self.module, self._chunks, self.optimizer, self._standing, own)
        if (versions := self._versions) is not None:
            ago, step = state.versions_saved(path, versions.names, versions.keep - 1), extra["step"]
            versions.restart(step, [step - each for each in ago])
            state.restore_versions(path, {each: versions.tensors(step - each) for each in ago}, self._standing)
        kept = {name: (part.tensors, part.on_resize) for name, part in self._exchange.state().items()}
        complete = state.restore_exchange(path, kept, self._standing)
        if not extra.get("kept_of_mean"):
            from_older(self._exchange.state(), extra, not self._exchange.keeps_back)
        if not complete and self._all.rank == 0:
            warnings.warn(
                f"{path.name} holds no state of plan.exchange = {self.plan.exchange!r}, or of parameters cut otherwise: that starts anew",
                stacklevel=2,
            )
        self._exchange.restored()
        self._go_on(extra)
        return extra["user"]

    def _go_on(self, extra: Mapping[str, Any]) -> None:
        """Takes over where a run was, from what `_place` said then; warns of what is given otherwise now, which wins."""
        saved = extra["scheduler"]
        if self.scheduler is not None and saved is not None:
            saved = state.in_the_form_of(self.scheduler.state_dict(), saved)
        changes = self._given.go_on(extra, saved)
        for change in [*changes, extra["anew"]] if extra.get("anew") else changes:
            if self._all.rank == 0:
                warnings.warn(change, stacklevel=3)
        self._source, self._runner.per_sample = extra["source"], extra["per_sample"]
        if self.loss_scale is not None and extra.get("loss_scale") is not None:
            self.loss_scale.load(extra["loss_scale"])
        self.step_index = extra["step"]

    def _newest(self, directory: Path) -> Path:
        """The newest good checkpoint; the first rank looks, since it reads every byte. Damaged ones are named in a warning."""
        found: Path | None = None
        damaged: list[str] = []
        if self._all.rank == 0:
            found = checkpoint.newest(directory, lambda bad, why: damaged.append(f"{bad.name}: {why}"))
        found, damaged = self._all.broadcast_object((found, damaged))
        if found is None:
            raise CheckpointError(
                f"no checkpoint to load in {directory}" + (f" (damaged: {'; '.join(damaged)})" if damaged else "")
            )
        if damaged and self._all.rank == 0:
            warnings.warn(f"damaged checkpoints passed over, {found.name} is used: {'; '.join(damaged)}", stacklevel=3)
        return found

    def export(self, directory: str | Path) -> Path:
        """Writes the weights as safetensors: in Hugging Face layout where the model has one, else by the model's own names. The first
        rank writes; all ranks return when it is done."""
        self._runner.flush()
        self.optimizer.settle()
        with self._as_one():
            weights = {}
            for chunk in self._chunks:  # those on a disk are read as they are written
                if (master := chunk.whole_master()) is not None:
                    weights.update({slot.name: slot.view(master) for slot in chunk.slots})
            of_experts = {name: value for name, value in weights.items() if self.layouts[name].of_experts}
            if self._group.rank == 0 and self._beside.size > 1:
                rest = {name: value for name, value in weights.items() if name not in of_experts}
                weights.update(whole_parameters(rest, self.layouts, self._beside))
            if self._parted.experts is not None and self._parted.experts.rank == 0:
                weights.update(whole_parameters(of_experts, self.layouts, self._parted.beside))
            if self._stage.rank == 0:
                saved = self.module.state_dict().keys() - {each.removeprefix("buffer.") for each in self._standing.silent}
                weights.update({name: buffer for name, buffer in self.module.named_buffers() if name in saved})
                if self._across is not None:
                    weights = of_all_stages(weights, self._across)
            failure = export_whole(self.module, weights, Path(directory)) if self._all.rank == 0 else None
            if (failure := self._all.broadcast_object(failure)) is not None:
                raise failure
        return Path(directory)

    def close(self) -> None:
        """Ends background work: waits for a save under way and for the lane."""
        with ExitStack() as stack:  # all of it, whichever of them raises
            if self._pager is not None:
                stack.callback(self._pager.close)
            stack.callback(self.optimizer.close)
            stack.callback(self._lane.close)
            stack.callback(self._storage.close)
            stack.callback(self._parted.close)
            if self._pipeline is not None:
                stack.callback(self._pipeline.close)
            stack.callback(self._exchange.close)
            stack.callback(self._runner.close)
            stack.callback(self._storage.leave)
            stack.callback(self._runner.settle)
            for writer in self._writers.values():
                stack.callback(writer.close)

    @property
    def parts(self) -> Parts:
        """What the engine is made of: for reports and those who look inside, not needed to train."""
        offload, lag = self._offload, self.plan.pp - 1 if self._versions is not None else int(self.device.type == "cuda")
        return Parts(
            mesh=self._mesh,
            chunks=self._chunks,
            chunk_bytes=self._chunk_bytes,
            link=self._link,
            passing=self._passing,
            recompute=self._recomputing,
            lender=self._lender,
            pager=self._pager,
            tier=None if offload is None else offload.tier,
            host=None if offload is None else offload.host,
            lag=lag,
            rounds=lambda batch: self._runner.cut(batch.ids).most,
        )

    @property
    def tensor_layers(self) -> CutLayers:
        """What `plan.tp` and `plan.ep` have made of each layer that this rank has, by which rule; printed it is a table."""
        return self._parted.layers

    @property
    def _across(self) -> Group | None:
        """The ranks of this one's pipeline."""
        return None if self._pipeline is None else self._pipeline.group

    def _tied(self) -> list[int]:
        """At which places of the pipeline there are weights that this rank's stages share with others; they become chunks apart, summed over all who have them."""
        if self._pipeline is None:
            return []
        sets = {tuple(places) for places in self._pipeline.tied.values()}
        for place in range(self.plan.pp):
            if len(several := sorted(each for each in sets if place in each)) > 1:
                raise UserError(
                    f"plan.pp: weights are shared by the ranks {several} of the pipeline, and each can be in one such set: {sorted(self._pipeline.tied)}; name the stages by hand (plan.stages) so that "
                    "these are the same ranks, or take plan.pp = 2"
                )
        own = next((list(places) for places in sets if self._pipeline.group.rank in places), [])
        if own:
            self._apart["tied"] = self.world.group(f"tied{self._serial}", self._mesh.on(own, self._mesh.ranks("dp", "cp")))
        for name, places in self._pipeline.tied.items():
            if places == own:
                self.layouts[name] = self.layouts[name].tied
        return own

    def _on_any_stage(self, here: bool) -> bool:
        """Whether it is so on any rank of the pipeline, which all call it alike."""
        if self._pipeline is None:
            return here
        return bool(self._pipeline.group.all_reduce(torch.tensor(int(here)), "max", purpose="stages"))

    def _without_flush(self, trainable: Sequence[Chunk], serial: int) -> dict[str, Any]:
        """What a runner of steps needs beside, where the schedule has no flush."""
        assert self._pipeline is not None
        late, together = delay(self.plan, self._pipeline.group.rank), option_name(self.plan.schedule, "schedule") == "2bw"
        self._versions = Versions(trainable, self.parameters, late + 1)
        telling = [
            self.world.group(f"dp-results{serial}", self._group.ranks),
            self.world.group(f"pp-results{serial}", self._mesh.ranks("pp")),
        ]
        return {"versions": self._versions, "delay": late, "together": together, "telling": telling}

    @property
    def _alike(self) -> bool:
        """Whether all ranks run as many forwards, since weights or tokens come together in them."""
        return self._passing is not None or self._parted.experts is not None

    def _among(self, group: Group, name: str, places: Sequence[int]) -> Group:
        """A further group of some of the ranks of `group`, by their places."""
        return self.world.group(f"{group.name}-{name}", [group.ranks[place] for place in places])

    def _recompute(self) -> Recompute | None:
        if option_name(self.plan.recompute, "recompute") == "none":
            return None
        if self.plan.compile and option_name(self.plan.recompute, "recompute") == "selective":
            raise UserError(
                'plan.recompute = "selective" sees no operations inside compiled blocks: take another, or compile = false'
            )
        again = [self._randomness.again] if self._keyed else []
        parts = recomputable(self.module)
        if not self._on_any_stage(bool(parts)):
            raise nothing_to_recompute()
        return Recompute(parts, self.plan.recompute, again)

    def _check_cut(self, optimizer: OptimizerFactory, options: list[dict[str, Any]], sync_bn: bool) -> None:
        """UserError for what does not go with a model that is cut, or with rows that are."""
        if self.plan.tp > 1 and self.precision.fp8:
            raise UserError('plan.tp > 1 does not go with precision = "fp8" yet: its products take whole matrices')
        cut = next((axis for axis in ("tp", "ep") if getattr(self.plan, axis) > 1), None)
        if cut is not None and needs_whole_parameters(optimizer, options, self.precision.master):
            raise UserError(
                f"plan.{cut} > 1 leaves each rank a part of {'each matrix' if cut == 'tp' else 'what stacks experts'}, and this optimizer looks at whole "
                "parameters: take an elementwise one (AdamW, SGD), or plan.dp"
            )
        if self.plan.cp > 1 and sync_bn:
            raise UserError("plan.cp > 1 does not go with sync_bn, which makes each rank's share of the samples one microbatch")


def _copied(piece: Piece) -> Piece:
    return replace(piece, tensor=piece.tensor.clone())

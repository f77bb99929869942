"""The engine: how one model and a plan become a running job. `__init__` is the assembly, phase by phase."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.assembly.arguments import check_arguments, check_batch, check_dataset
from shoal.assembly.batches import batches
from shoal.assembly.compatibility import check, check_buffers
from shoal.assembly.memory import lay_out
from shoal.assembly.model import build_alike, localize, microbatch_of, whole_model
from shoal.assembly.parts import Parts, parts_of
from shoal.assembly.ranks import ranks as ranks_of
from shoal.assembly.rebuild import Rebuild
from shoal.assembly.recipe import Recipe
from shoal.assembly.trainer import closing, trainer
from shoal.assembly.uses import callable_model, evaluate_on, loop_over, objective_of, session
from shoal.comm import World
from shoal.data import Batch
from shoal.data.loader import Collate, Order
from shoal.errors import UserError
from shoal.launch import join
from shoal.models.generate import generate
from shoal.optim.lr import Schedule
from shoal.optim.optimizer import GroupRule, OptimizerFactory
from shoal.parallel.tensor import CutLayers, Rules
from shoal.plan import Plan
from shoal.training.evaluation import Evaluation
from shoal.training.loop import Loop
from shoal.training.loss import Loss
from shoal.training.norms import ClipRule, whole_gradients
from shoal.training.objective import Objective
from shoal.training.result import StepResult


class Engine:
    """Trains `model`, written for one device, on the ranks of `world` as `plan` says.

    model: a factory without arguments, or a ready module.
    loss: `loss(model, microbatch)` returns (sum, count) or (sum, count, {name: auxiliary mean}).
    optimizer: takes a list of parameter groups, e.g. `partial(torch.optim.AdamW, lr=3e-4)`.
    plan: by default data parallel over all ranks.
    global_batch: samples a step.
    microbatch: samples a forward; must be given where the model has batch-wide statistics. None takes a rank's whole
        share, of a pipeline so few that its ranks seldom wait.
    precision: "fp32", "tf32", "fp64", "bf16", "fp16", "fp8", or a table with its parameters (see `precision`).
    clip: largest norm of the global gradient, or a function from the norms by name to a factor, or to factors by name.
    clip_value: largest absolute value of an element of the gradient.
    schedule: `schedule(optimizer)` gives a torch LRScheduler, stepped once a step.
    param_groups: `param_groups(name, parameter)` gives the options of the parameter's group.
    tensor_rules: how layers are cut for `plan.tp`, beside what is known (see parallel.tensor.rules).
    sync_bn: BatchNorm statistics over the global batch.
    dropout: "keyed" (any plan drops the same) or "fused" (torch's own kernels; depends on the plan).
    buffers: of those that forwards write and several ranks cannot have as one process would, "exact" refuses, "averaged"
        takes the mean over microbatches.
    keep_gradients: for `gradients()`.
    norms_every: after so many steps the result has `norms` by name; 0 for never.
    collate: makes a batch of samples.
    world: by default what the launcher's variables say.

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
        arguments = dict(locals())
        check_arguments(arguments)
        self.world = world or join()
        self.plan = plan or Plan(dp=self.world.size)
        self.device, self.ledger = self.world.device, self.world.ledger

        ranks = self._ranks = ranks_of(self.plan, self.world)
        check_buffers(buffers)
        recipe = self._recipe = Recipe.taken_from(arguments)
        whole = whole_model(build_alike(model, seed, ranks), param_groups)
        check(self.plan, recipe, whole.built.module, whole.options)
        self.microbatch = microbatch_of(whole.built.module, recipe, self.plan)
        local = self._local = localize(
            whole, ranks, recipe.precision, seed=seed, rules=tensor_rules, sync_bn=sync_bn, dropout=dropout
        )
        memory = self._memory = lay_out(local, recipe, self.microbatch)
        train = self._trainer = trainer(local, memory, recipe, self.microbatch)
        self._rebuild, self._closing = Rebuild(local, memory, train), closing(local, memory, train)
        self._session = session(local, memory, train, recipe, self._closing)

        self.seed, self.global_batch, self.precision = seed, global_batch, memory.precision
        self.module, self.build_note, self.layouts = local.module, local.built.how, local.layouts
        self.parameters, self.optimizer, self.scheduler = memory.parameters, train.optimizer, train.scheduler
        self.loss_scale = train.loss_scale

    def __repr__(self) -> str:
        elements = sum(math.prod(layout.shape) for layout in self.layouts.values())
        plan = ", ".join(f"{key}={value!r}" for key, value in self.plan.to_dict().items())
        return (
            f"Engine({type(self.module).__name__} of {elements:,} parameters, Plan({plan}), {self.precision.name}, "
            f"step {self.step_index}, {self.world})"
        )

    @property
    def step_index(self) -> int:
        """The step that comes next."""
        return self._session.progress.step

    @step_index.setter
    def step_index(self, step: int) -> None:
        self._session.progress.step = step

    @property
    def run(self) -> str:
        """The name of the run, by which `recover` knows its own."""
        return self._session.progress.run

    @run.setter
    def run(self, name: str) -> None:
        self._session.progress.run = name

    def batches(
        self, dataset: Any, *, steps: int | None = None, epochs: int | None = None, cursor: Order | None = None
    ) -> Iterator[Batch]:
        """The global batches from the engine's step on: `steps` of them, or up to the end of `epochs`, or without end.

        A map-style dataset is read in an order that depends on seed and step alone, each sample once an epoch; the epoch's last
        batch is short. `cursor` gives another order of it, such as `data.BalancedCursor`. An iterable is read by rank 0 and
        dispatched; its place is saved in checkpoints.
        """
        everyone, progress = self._ranks.everyone, self._session.progress
        return batches(dataset, steps, epochs, cursor, self._recipe, everyone, progress)

    def step(self, batch: Batch) -> StepResult:
        """Trains on one global batch. The result is lazy and the same on every rank.

        Raises TrainingError on a loss or gradient that is not finite; weights, optimizer and BatchNorm's statistics then are
        those of the step before.
        """
        check_batch(batch, self.step_index)
        result = self._trainer.runner.run(batch)
        self._stepped()
        return result

    def _stepped(self) -> None:
        self.step_index += 1
        self._rebuild.after_step(self._session.place)

    def settle(self) -> None:
        """Ends what the exchange does in the background, until the next step.

        All ranks call it, each after its last step, before they meet in a collective of the program's: where ranks need not be
        at the same step (async_average), others would wait for this one in a round of averaging, and it for them.
        """
        self._memory.exchange.settle()

    def gradients(self) -> dict[str, Tensor]:
        """The last step's by name, after the exchange and before clipping, in the unit of the mean loss; whole where plan.zero
        cuts them, of a model that is cut this rank's part. All ranks call it alike. Raises UserError without `keep_gradients`,
        which costs a copy a step, or before the first step."""
        kept = self._trainer.runner.gradients
        if not kept:
            raise UserError("no gradients are kept: give Engine(keep_gradients=True), and ask after a step")
        found = whole_gradients(self._memory.exchange.replica.chunks, kept)
        return {name: found[name] for name in self.parameters if name in found}

    def loop(self, microbatches: int = 1) -> Loop:
        """The engine's steps for a loop that the caller owns, `microbatches` of it a step and rank.

        Ranks among whom a model is cut (plan.tp) are to be given the same. Raises UserError for more than its `global_batch`
        has, where that has decided how gradients are kept.
        """
        step_index = lambda: self.step_index  # noqa: E731
        return loop_over(self._local, self._memory, self._trainer, microbatches, step_index, self._stepped)

    def evaluate(self, dataset: Any, *, max_batches: int | None = None, measure: Loss | None = None) -> Evaluation:
        """Mean loss over a map-style dataset in evaluation mode, or over its first `max_batches` global batches.

        `measure`: another function than the engine's loss, which returns (sum, count) as that does.
        """
        check_dataset(dataset, indexed=True)
        self._trainer.runner.flush()
        samples = min(len(dataset), (max_batches or len(dataset)) * self.global_batch)
        with self._session.as_one():
            return evaluate_on(self._local, self._memory, self._recipe, self.microbatch, dataset, samples, measure)

    def generate(
        self,
        ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Token ids [B, T], the same on every rank, continued to [B, T + max_new_tokens] by a model that predicts the next token
        (see `models.generate`); under any plan, all ranks call it alike and get the same. `seed`: of the draws, by default the
        engine's."""
        draw = torch.Generator(self.device).manual_seed(self.seed if seed is None else seed)
        # compiled blocks would be compiled anew for each length
        with self._session.as_one(), self.whole_weights(), torch.compiler.set_stance("force_eager"):
            return generate(self.model, ids.to(self.device), max_new_tokens, temperature, top_k, draw)

    def whole_weights(self) -> AbstractContextManager[None]:
        """Inside, the module's parameters can be read, also where each rank keeps only a stretch of them (`plan.zero = 3` without
        shared memory; outside they show NaN there). All ranks call it alike, between steps."""
        return nullcontext() if self._memory.gather is None else self._memory.gather.whole()

    @property
    def model(self) -> nn.Module:
        """The model, to be called without gradients: `module`, or where it is cut into stages all of them, whose ranks call it
        alike and get the same."""
        return callable_model(self._local, self._memory, self._trainer)

    def objective(self, batch: Batch) -> Objective:
        """The mean loss of a global batch as a pure function of the parameters, for `torch.func`: grad, jvp and products with the
        Hessian pass through its collectives and equal one process. All ranks must call it alike."""
        return objective_of(self._local, self._memory, self._trainer, self._recipe, batch)

    def save(
        self, directory: str | Path, *, wait: bool = True, keep: int = 3, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Writes `directory/step-XXXXXXXX`; all ranks call it.

        `wait=False` returns once the state is copied, unless a part of it lies on the disk of `plan.memory`: then there is no
        memory for a copy. Raises CheckpointError if this save (or, without waiting, the one before) failed; the last good
        checkpoint stays.
        """
        self._session.save(directory, wait, keep, extra)

    def recover(self, after: int = -1) -> bool:
        """Goes on from the last update that all ranks have on the disk of `plan.memory`, if there is one of this model and plan,
        of the run `engine.run` (a name of any kind), of a step later than `after`; returns whether. All ranks call it alike,
        before the first step.

        For a run that was killed: no update is lost. There is one where the optimizer's side of all chunks lies on the disk.
        Frozen parameters are what the model was built with.
        """
        return self._session.recover(after)

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Reads a checkpoint written under any plan: one `step-...`, or the newest good one in `directory`. Returns its user
        `extra`."""
        return self._session.load(directory)

    def export(self, directory: str | Path) -> Path:
        """Writes the weights as safetensors: in Hugging Face layout where the model has one, else by the model's own names. The
        first rank writes; all ranks return when it is done."""
        return self._session.export(directory)

    def close(self) -> None:
        """Ends background work: waits for a save under way and for the lane."""
        self._closing.close()

    @property
    def parts(self) -> Parts:
        """What the engine is made of: for reports and those who look inside, not needed to train."""
        return parts_of(self._local, self._memory, self._trainer)

    @property
    def tensor_layers(self) -> CutLayers:
        """What `plan.tp` and `plan.ep` have made of each layer that this rank has, by which rule; printed it is a table."""
        return self._local.parted.layers

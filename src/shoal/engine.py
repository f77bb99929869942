"""The engine: how one model and a plan become a running job. `assemble` goes from phase to phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from shoal.assembly.arguments import check_arguments, check_regroup, world_to_go_on
from shoal.assembly.assembled import Assembled
from shoal.assembly.compatibility import check
from shoal.assembly.memory import lay_out
from shoal.assembly.model import build_alike, localize
from shoal.assembly.ranks import ranks as ranks_of
from shoal.assembly.recipe import SAME, Recipe
from shoal.assembly.replan import joined, started
from shoal.assembly.running import Running
from shoal.assembly.trainer import trainer
from shoal.comm import World
from shoal.data.loader import Collate
from shoal.launch import join
from shoal.optim.groups import GroupRule, OptimizerFactory
from shoal.optim.lr import Schedule
from shoal.parallel.tensor import Rules
from shoal.plan import Plan
from shoal.training.loss import Loss
from shoal.training.microbatches import choose_microbatch
from shoal.training.norms import ClipRule
from shoal.training.result import StepResult


class Engine(Running):
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
    buffers: where forwards write buffers that several ranks cannot have as one process would: "exact" refuses,
        "averaged" takes the mean over microbatches.
    keep_gradients: for `gradients()`; collate: makes a batch of samples.
    norms_every: after so many steps the result has `norms` by name; 0 for never.
    world: by default what the launcher's variables say.
    joins: takes the state of the run from the other ranks of `world`, which call `regroup` (see `made`).

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
        joins: bool = False,
    ) -> None:
        arguments = dict(locals())
        check_arguments(arguments)
        world = world or join()
        recipe, plan = Recipe.taken_from(arguments), plan or Plan(dp=world.size)
        make = partial(assemble, recipe=recipe, plan=plan, world=world, fill=not joins)
        super().__init__(model, *(joined(world, model, make) if joins else started(make(model))))

    def replan(self, plan: Plan, world: World | None = None) -> None:
        """Goes on under another plan, as a run would that saved, stopped and loaded under it, but in memory: each rank
        gets what it lacks from one that has it. All ranks call it alike, between steps.

        world: the ranks that go on, where they are fewer (see `World.among`); the others call `leave` meanwhile.

        The old and the new state are in memory together while it runs. `module`, `optimizer`, `parameters` and the
        like are others afterwards (the old module is empty), and `loop()` is to be called again. Raises UserError for
        a plan that does not fit, and for an engine that was given a ready module, StorageError for a disk that cannot
        be used, and CheckpointError if a save under way fails; the old plan goes on then. Whatever else one rank
        raises on the way ends the run on all of them.
        """
        world = world_to_go_on(plan, world, self.world)
        self._replan(partial(assemble, recipe=self._recipe, plan=plan, world=world, fill=False), world)

    def regroup(self, plan: Plan, world: World, microbatch: int | str | None = SAME) -> StepResult | None:
        """Goes on in memory with the ranks of `world`, after others have failed or with more, from the newest step that
        they hold. They call it alike, after a step that raised LaunchError or between two; new ranks make an
        `Engine(..., joins=True)`. A step cut short is undone: call `batches(...)` again. `microbatch`: another one.

        Returns the result of the last step where no loop has got it (see `made`). Raises CheckpointError, on all ranks
        alike, where what they hold is not enough (see checkpoint.survivors). Otherwise as `replan`.
        """
        check_regroup(plan, world, self.world)
        return self._regroup(partial(assemble, plan=plan, world=world, fill=False), world, microbatch)


def assemble(
    model: nn.Module | Callable[[], nn.Module], recipe: Recipe, plan: Plan, world: World, fill: bool = True
) -> Assembled:
    """Makes of `model` what trains it on the ranks of `world` as `plan` says; without `fill` weights have no values
    yet."""
    with ExitStack() as undo:  # what a phase has taken, if a later one refuses
        ranks = ranks_of(plan, world)
        undo.callback(ranks.leave)
        whole = build_alike(model, recipe, ranks)
        module = whole.built.module
        check(plan, recipe, module, whole.groups.options)
        microbatch = choose_microbatch(recipe.microbatch, recipe.global_batch, plan, module, recipe.sync_bn)
        local = localize(
            whole,
            ranks,
            recipe.precision,
            seed=recipe.seed,
            rules=recipe.tensor_rules,
            sync_bn=recipe.sync_bn,
            dropout=recipe.dropout,
        )
        memory = lay_out(local, recipe, microbatch, undo, fill)
        assembled = Assembled(recipe, microbatch, local, memory, trainer(local, memory, recipe, microbatch))
        undo.pop_all()
    return assembled

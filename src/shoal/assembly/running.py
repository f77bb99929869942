"""A model in training: what an engine does once it is assembled, step after step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.assembly.arguments import check_batch, check_dataset, check_max_batches, check_save
from shoal.assembly.batches import batches
from shoal.assembly.changing import Changing
from shoal.assembly.own_loops import check_loop, check_objective
from shoal.assembly.parts import Parts, parts_of
from shoal.assembly.verify import held
from shoal.comm import World
from shoal.data import BalancedCursor, Batch, Cursor, ElasticSampler
from shoal.data.loader import Order
from shoal.errors import UserError
from shoal.models.generate import generate
from shoal.parallel.tensor import CutLayers
from shoal.training.evaluation import Evaluation, HeldOut, evaluate
from shoal.training.loop import Loop
from shoal.training.loss import Loss
from shoal.training.norms import whole_gradients
from shoal.training.objective import Objective
from shoal.training.result import StepResult
from shoal.training.step import StepRunner
from shoal.training.vote import Vote, check_verify, vote

T = TypeVar("T")


class Running(Changing):
    """A job under way, over the phases of its assembly. Every method is called by all ranks alike, between steps."""

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

        A map-style dataset is read in an order that depends on seed and step alone, each sample once an epoch; the
        epoch's last batch is short. `cursor` gives another order of it, such as `data.BalancedCursor`. An iterable is
        read by rank 0 and dispatched; checkpoints have its place, and a batch that was not trained comes again.
        """
        everyone, progress = self._local.ranks.everyone, self._session.progress
        return batches(dataset, steps, epochs, cursor, self._recipe, everyone, progress)

    def step(self, batch: Batch) -> StepResult:
        """Trains on one global batch. The result is lazy and the same on every rank.

        Raises TrainingError on a loss or gradient that is not finite; weights, optimizer and BatchNorm's statistics
        then are those of the step before.
        """
        check_batch(batch, self._between_steps().progress.step)
        with self.world.refusing(f"step {batch.step}"):
            result = self._trainer.runner.run(batch)
        self._stepped()
        return result

    def _stepped(self) -> None:
        self.step_index += 1
        self._rebuild.after_step(self._session.place)  # where ranks may meet, and lose each other
        self._trainer.runner.reported()
        self._begin()

    def settle(self) -> None:
        """Ends what the exchange does in the background, until the next step.

        All ranks call it, each after its last step, before they meet in a collective of the program's: where ranks need
        not be at the same step (async_average), others would wait for this one in a round of averaging, and it for
        them.
        """
        self._memory.exchange.settle()

    def verify(self) -> Vote:
        """Has replicas compare what they hold, bit by bit: weights, masters, optimizer state, buffers. All ranks call
        it alike, between steps; it costs a pass over the memory, and one small collective.

        Raises CorruptionError, on all ranks, where they differ: with the rank that is wrong, where there are three or
        more; of two nobody knows which. What no other rank holds, such as the shards of plan.zero, cannot be compared:
        the result says how much that is. Raises UserError where replicas differ on purpose.
        """
        check_verify(self.plan, self._memory.exchange, self._local.flushes)
        self.settle()
        self._trainer.runner.settle()
        self._trainer.optimizer.settle()
        held_here = list(held(self._local, self._memory, self._trainer))
        return vote(held_here, self._local.ranks.everyone, self.step_index)

    def gradients(self) -> dict[str, Tensor]:
        """The last step's by name, after the exchange and before clipping, in the unit of the mean loss; whole where
        plan.zero cuts them, of a model that is cut this rank's part. All ranks call it alike. Raises UserError without
        `keep_gradients`, which costs a copy a step, or before the first step."""
        kept = self._trainer.runner.gradients
        if not kept:
            raise UserError("no gradients are kept: give Engine(keep_gradients=True), and ask after a step")
        found = whole_gradients(self._memory.exchange.replica.chunks, kept)
        return {name: found[name] for name in self.parameters if name in found}

    def loop(self, microbatches: int = 1) -> Loop:
        """The engine's steps for a loop that the caller owns, `microbatches` of it a step and rank.

        Ranks among whom a model is cut (plan.tp) are to be given the same. Raises UserError for more than its
        `global_batch` has, where that has decided how gradients are kept.
        """
        local, runner, group = self._local, self._trainer.runner, self._local.ranks.replicas
        check_loop(self.plan, microbatches, self.precision)
        assert isinstance(runner, StepRunner)
        partners = [group.ranks.index(rank) for rank in self._memory.exchange.partners.ranks]
        meets = runner.dealing.lockstep or runner.dealing.all_run
        joined = None if meets else partial(local.ranks.among, group, "join", range(group.size))
        progress = self._session.progress
        loop = Loop(runner, group, microbatches, lambda: progress.step, self._stepped, partners, joined)
        self._loops.add(loop)
        return loop

    def sampler(
        self, dataset: Any, *, cursor: Cursor | BalancedCursor | None = None, name: str = "sampler"
    ) -> ElasticSampler:
        """The parts of this rank of the global batches of a map-style dataset, in the order of `batches`, for a torch
        DataLoader of a loop of your own (see ElasticSampler): registered as `state` by this name, and resized when the
        ranks change."""
        check_dataset(dataset, indexed=True)
        order, runner = cursor or Cursor(len(dataset), self.global_batch, self.seed), self._trainer.runner
        sampler = self.state(name, ElasticSampler(order, *runner.dealing.place))

        def resize(old: World, new: World) -> None:
            sampler.resize(*self._trainer.runner.dealing.place)

        self.on_resize(resize)
        return sampler

    def evaluate(
        self, dataset: Any, *, max_batches: int | None = None, measure: Loss | None = None, also: Sequence[Loss] = (),
        progress: Callable[[int, int], object] | None = None,
    ) -> Evaluation:  # fmt: skip
        """Mean loss over a map-style dataset in evaluation mode, or over its first `max_batches` global batches.

        `measure`: taken in place of the engine's loss; returns (sum, count) as that does. `also`: further ones, taken
        in the same pass, whose means the result has under that name. `progress`: is called on each rank while it
        evaluates, with how many of its microbatches are done, and of how many.

        Raises UserError for less than one batch, and where nothing in them counts.
        """
        check_dataset(dataset, indexed=True)
        check_max_batches(max_batches)
        runner, recipe = self._trainer.runner, self._recipe
        runner.flush()
        samples = min(len(dataset), (max_batches or len(dataset)) * self.global_batch)
        forward = replace(runner.forward, loss=measure or recipe.loss)
        data, local = HeldOut(dataset, samples, recipe.collate), self._local
        with self._session.as_one(), self.world.refusing(f"evaluation {self.step_index}"):
            return evaluate(forward, runner.dealing, data, local.ranks.replicas, runner.accumulate, also, progress)

    def generate(
        self, ids: Tensor, max_new_tokens: int, *, temperature: float = 1.0, top_k: int | None = None,
        seed: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Token ids [B, T], the same on every rank, continued to [B, T + max_new_tokens] by a model that predicts the
        next token (see `models.generate`); under any plan, all ranks call it alike and get the same. `seed`: of the
        draws, by default the engine's."""
        draw = torch.Generator(self.device).manual_seed(self.seed if seed is None else seed)
        # compiled blocks would be compiled anew for each length
        with self._session.as_one(), self.whole_weights(), torch.compiler.set_stance("force_eager"):
            return generate(self.model, ids.to(self.device), max_new_tokens, temperature, top_k, draw)

    def whole_weights(self) -> AbstractContextManager[None]:
        """Inside, the module's parameters can be read, also where each rank keeps only a stretch of them (`plan.zero =
        3` without shared memory; outside they show NaN there). All ranks call it alike, between steps."""
        return nullcontext() if self._memory.gather is None else self._memory.gather.whole()

    @property
    def model(self) -> nn.Module:
        """The model, to be called without gradients: `module`, or where it is cut into stages all of them, whose ranks
        call it alike and get the same."""
        model, runner = self.module, self._trainer.runner
        lockstep = self._local.ranks.replicas if runner.dealing.lockstep else None
        for axis in self._local.axes:
            model = axis.whole(model, lockstep, runner.flush)
        return model

    def objective(self, batch: Batch) -> Objective:
        """The mean loss of a global batch as a pure function of the parameters, for `torch.func`: grad, jvp and
        products with the Hessian pass through its collectives and equal one process. All ranks must call it alike."""
        check_objective(self.plan)
        ranks, runner = self._local.ranks, self._trainer.runner
        experts = self._local.parallelized.experts or ranks.replicas
        groups = {
            name: experts if layout.of_experts else ranks.stage if layout.reduce else ranks.replicas
            for name, layout in self.layouts.items()
        }
        return Objective(runner.forward, runner.dealing, batch, ranks.replicas, groups)

    def save(
        self, directory: str | Path, *, wait: bool = True, keep: int = 3, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Writes `directory/step-XXXXXXXX`, and deletes all but the `keep` newest up to it; all ranks call it.

        `wait=False` returns once the state is copied, unless a part of it lies on the disk of `plan.memory`: then there
        is no memory for a copy. Raises CheckpointError if this save (or, without waiting, the one before) failed, and
        LaunchError where another rank is gone; the last good checkpoint stays.
        """
        check_save(keep, extra)
        self._between_steps().save(directory, wait, keep, extra)

    def state(self, name: str, thing: T) -> T:
        """Registers an object of the caller's: it is saved and loaded with the run, goes back with a step that
        `regroup` undoes, and is given to ranks that join. Returns it.

        thing: has `state_dict()` and `load_state_dict(...)`, or is a dict, list, dataclass, tensor or array, which is
            changed in place; of numbers, texts, tensors, arrays and containers of them. It is kept alike on all ranks:
            there is one copy, that of rank 0.

        If `load` has been called before, or the engine joins others, the object gets its values here. Each step begins
        with a copy of all tensors in it. Raises UserError for what cannot be saved.
        """
        self._session.user.register(name, thing, self.step_index)
        return thing

    def commit(self) -> None:
        """Makes the registered objects, as they are now, what `restore` and a `regroup` that undoes the step go back
        to. A step makes a commit when it begins, unless this was called since the one before it: for a loop that
        changes the objects before its first forward, or in the middle of a step and wants to keep that."""
        self._session.user.commit(self.step_index)

    def restore(self) -> None:
        """Puts the registered objects back to the last commit: after a TrainingError, say. Weights and optimizer
        stay."""
        self._session.user.restore()

    def recover(self, after: int = -1) -> bool:
        """Goes on from the last update that all ranks have on the disk of `plan.memory`, if there is one of this model
        and plan, of the run `engine.run` (a name of any kind), of a step later than `after`; returns whether. All ranks
        call it alike, before the first step.

        For a run that was killed: no update is lost. There is one where the optimizer's side of all chunks lies on the
        disk. Frozen parameters are what the model was built with. The disk has nothing of objects registered by
        `state`: where there are some, False.
        """
        return self._session.recover(after)

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Reads a checkpoint written under any plan: one `step-...`, or the newest good one in `directory`. Returns its
        user `extra`."""
        return self._between_steps().load(directory)

    def export(self, directory: str | Path) -> Path:
        """Writes the weights as safetensors: in Hugging Face layout where the model has one, else by the model's own
        names. The first rank writes; all ranks return when it is done."""
        return self._session.export(directory)

    def weights_on_first(self) -> dict[str, Tensor]:
        """Weights and persistent buffers by name, all and whole on the first rank. All ranks call it, between steps."""
        return self._session.whole_weights()

    @property
    def parts(self) -> Parts:
        """What the engine is made of: for reports and those who look inside, not needed to train."""
        return parts_of(self._local, self._memory, self._trainer)

    @property
    def tensor_layers(self) -> CutLayers:
        """What `plan.tp` and `plan.ep` have made of each layer that this rank has, by which rule; printed it is a
        table."""
        return self._local.parallelized.layers

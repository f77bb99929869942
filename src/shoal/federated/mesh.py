"""A client that is a whole mesh: an engine under a plan of its own. Rank 0 is asked, the other ranks follow it.

What is asked is told to all ranks by a broadcast. The whole model comes and goes as a vector on rank 0; each rank takes
of it what its plan gives it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.data import Batch
from shoal.engine import Engine
from shoal.errors import LaunchError, TrainingError, UserError
from shoal.federated.clients import Clients, Held, rows_of_batches
from shoal.federated.flat import Flat
from shoal.federated.partition import Numbers
from shoal.federated.recipe import Recipe
from shoal.module.build import build
from shoal.optim.fresh import begin_anew
from shoal.plan import option_name
from shoal.training.step import StepRunner

TURN = 1 << 24
"""Steps of the engine between the beginnings of two turns, so that what it draws depends on the turn alone."""
REST = 2.0
"""Seconds between two words of rank 0 while nothing is asked: a rank that hears nothing for longer says so."""
END, NOTHING, TRAIN, MEASURE = "end", "nothing", "train", "measure"


@dataclass(frozen=True)
class Done:
    """What a client has done: its weights, whole (on rank 0), the sum of its losses, what that is divided by, and the
    local steps that were made."""

    weights: Tensor
    losses: float
    counts: float
    steps: int


@dataclass(frozen=True)
class Rows:
    """Samples as a map-style dataset."""

    held: Held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: values[index] for key, values in self.held.tensors.items()}


class MeshClient:
    """Trains one client on the ranks of `engine.world`, which make it alike.

    engine: of the recipe, at its initial weights, with a batch of `recipe.batch` and no schedule; it is this client's
        alone from here on.
    own: the samples of the client, as the only one of `Clients`. number: which client it is among all.

    On rank 0 `train` and `measure` are called, by one thread, and `close` at the end (or use it as a context manager);
    the other ranks call `follow`. A loss that is not finite raises TrainingError in `train`, and the mesh goes on. What
    one rank alone raises ends it: that rank fails, and rank 0 gets LaunchError, which names it; `broken` says so.
    """

    def __init__(self, engine: Engine, recipe: Recipe, own: Clients, number: int) -> None:
        _check(engine, own)
        self._engine, self._recipe, self._own, self._number = engine, recipe, own, number
        self.flat = Flat(build(recipe.model, recipe.seed).module)
        buffers = dict(engine.module.named_buffers())
        self._kept = {name: each.clone() for name, each in buffers.items() if name not in set(self.flat.buffers)}
        self._anchors: dict[int, Tensor] = {}
        self._lock, self._over = threading.Lock(), threading.Event()
        self.broken: BaseException | None = None
        self._leads = engine.world.rank == 0
        self._rests: threading.Thread | None = None
        if self._leads and engine.world.size > 1:
            self._rests = threading.Thread(target=self._rest, name="mesh at rest", daemon=True)
            self._rests.start()

    @property
    def samples(self) -> int:
        """Samples that it trains on."""
        return len(self._own.train)

    @property
    def counts(self) -> Numbers:
        """The number of samples, as an array with this one client."""
        return self._own.train.counts

    @property
    def ranks(self) -> int:
        return self._engine.world.size

    @property
    def batch(self) -> int:
        """Samples of a local step."""
        return self._recipe.batch

    def train(self, weights: Tensor, turn: int, steps: int, mu: float = 0.0, seconds: float | None = None) -> Done:
        """Makes `steps` local steps from `weights` [size of the model], with a fresh optimizer; rank 0 calls it.

        turn: the number of the round, by which samples and learning rate are drawn. mu: see Strategy. seconds: after
        so many it makes no further step, but the first.
        """
        return self._ask((TRAIN, turn, steps, mu, seconds), weights)

    def measure(self, weights: Tensor) -> tuple[float, int, float | None] | None:
        """Returns the mean loss of `weights` over what the client holds out, the count, and the accuracy where the
        recipe has a measure; None where it holds nothing out. Rank 0 calls it."""
        return self._ask((MEASURE,), weights) if len(self._own.held_out) else None

    def follow(self) -> None:
        """Does what rank 0 is asked, until it ends. Raises LaunchError where it ended without a word."""
        world = self._engine.world
        try:
            while (told := world.everyone.broadcast_object(None))[0] != END:
                if told[0] != NOTHING:
                    with suppress(TrainingError):  # all ranks alike; rank 0 tells who asked
                        self._do(told, None)
        except BaseException:
            world.close()  # so that no other rank waits for this one
            raise

    def close(self) -> None:
        """Ends the other ranks' `follow`; on rank 0."""
        self._over.set()
        if self._rests is not None:
            self._rests.join()
        with self._lock:
            if self._leads and self.broken is None:
                self.broken = LaunchError("the mesh of this client was closed")
                self._engine.world.everyone.broadcast_object((END,))

    def __enter__(self) -> MeshClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rest(self) -> None:
        while not self._over.wait(REST):
            with self._lock:
                if self.broken is not None:
                    return
                try:
                    self._engine.world.everyone.broadcast_object((NOTHING,))
                except LaunchError as error:
                    self.broken = error

    def _ask(self, told: tuple[object, ...], weights: Tensor) -> Any:
        with self._lock:
            if self.broken is not None:
                raise self.broken
            if weights.shape != (self.flat.size,):
                raise UserError(
                    f"weights of shape {tuple(weights.shape)}: this model has {self.flat.size} numbers. Give server "
                    "and client the same model"
                )
            try:
                self._engine.world.everyone.broadcast_object(told)
                return self._do(told, weights)
            except TrainingError:
                raise
            except BaseException as error:
                self.broken = error
                self._engine.world.close()  # so that no other rank waits for this one
                raise

    def _do(self, told: Sequence[Any], weights: Tensor | None) -> Any:
        self._put(weights)
        if told[0] == MEASURE:
            return self._measure()
        _, turn, steps, mu, seconds = told
        return self._train(int(turn), int(steps), float(mu), seconds)

    def _train(self, turn: int, steps: int, mu: float, seconds: float | None) -> Done:
        engine, recipe, runner = self._engine, self._recipe, self._engine.parts.runner
        assert isinstance(runner, StepRunner) and steps < TURN
        began, losses, counts, made = time.monotonic(), 0.0, 0.0, 0
        begin_anew(engine.optimizer, recipe.rate(turn - 1))
        runner.pulled_by(self._pull(mu))
        runner.per_sample, engine.step_index = 1.0, turn * TURN
        (rows,) = rows_of_batches(self._own.train, [0], [turn], steps, recipe.batch, recipe.seed, [self._number])
        for ids in rows.tolist():
            if (
                seconds is not None
                and made
                and engine.world.everyone.broadcast_object(time.monotonic() - began > seconds)
            ):
                break
            batch = Batch(engine.step_index, 0, tuple((self._number << 32) + each for each in ids), self._load)
            result = engine.step(batch)
            made += 1
            if result.count:
                losses, counts = losses + result.loss * result.count, counts + result.count
        return Done(self._whole(), losses, counts, made)

    def _load(self, ids: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.tensor(ids, dtype=torch.int64) - (self._number << 32)
        return {key: values[rows] for key, values in self._own.train.tensors.items()}

    def _pull(self, mu: float) -> Callable[[Chunk], None] | None:
        """Returns what adds mu (w - w0) to a mean gradient, with w0 as the weights are now; None without mu."""
        self._anchors = {}
        if not mu:
            return None
        chunks = [chunk for chunk in self._engine.parts.chunks if chunk.trainable]
        self._anchors = {chunk.index: chunk.owned.master.clone() for chunk in chunks}

        def pull(chunk: Chunk) -> None:
            moved = chunk.owned.master - self._anchors[chunk.index]
            chunk.owned.gradient.add_(moved.to(chunk.owned.gradient), alpha=mu)

        return pull

    def _measure(self) -> tuple[float, int, float | None]:
        measure = self._recipe.measure
        found = self._engine.evaluate(Rows(self._own.held_out), also=() if measure is None else (measure,))
        return found.loss, found.tokens, found.also[0] if found.also else None

    @torch.no_grad()
    def _put(self, weights: Tensor | None) -> None:
        """Sets each rank's part of the model to `weights`, which rank 0 gives, one parameter after the other."""
        engine, everyone = self._engine, self._engine.world.everyone
        chunks, layouts, buffers = engine.parts.chunks, engine.layouts, dict(engine.module.named_buffers())
        places: dict[str, list[tuple[Chunk, int]]] = {}
        for chunk in chunks:
            if chunk.group is not None:
                chunk.group.barrier()  # another rank may still read weights in shared memory
            for index, slot in enumerate(chunk.owned.slots):
                places.setdefault(slot.name, []).append((chunk, index))
        given = None if weights is None else self.flat.named(weights.to(self.flat.dtype))
        for name, shape in zip((*self.flat.names, *self.flat.buffers), self.flat.shapes, strict=True):
            room = torch.empty(shape, dtype=self.flat.dtype, device=engine.device)
            whole = everyone.broadcast(room if given is None else room.copy_(given[name]), purpose="weights")
            for chunk, index in places.get(name, ()):
                slot, own = chunk.owned.slots[index], layouts[name].own_part(whole)
                part = own.flatten()[slot.start :][: slot.numel]
                slot.view(chunk.owned.master).copy_(part.view(slot.shape))
            if name in buffers:
                buffers[name].copy_(whole)
        for name, value in self._kept.items():
            buffers[name].copy_(value)
        for chunk in chunks:
            chunk.publish()

    def _whole(self) -> Tensor:
        """Returns the vector of the model on rank 0; elsewhere an empty one. All ranks call it."""
        found = self._engine.weights_on_first()
        return self.flat.vector(found).cpu() if self._leads else torch.empty(0)


def _check(engine: Engine, own: Clients) -> None:
    """Raises UserError for a plan under which a client cannot begin anew in each round."""
    plan = engine.plan
    if (name := option_name(plan.exchange, "exchange")) not in ("allreduce", "hierarchical"):
        raise UserError(f'plan.exchange = "{name}": the ranks of a federated client sum gradients: take "allreduce"')
    if plan.memory is not None or plan.buddy:
        raise UserError(
            "plan.memory and plan.buddy are of a run that keeps its optimizer: a federated client begins "
            "anew in each round. Remove them"
        )
    if not isinstance(engine.parts.runner, StepRunner):
        raise UserError(
            f'plan.schedule = {plan.schedule!r} has no flush, and a client ends its work in each round: take "1f1b"'
        )
    if not len(own.train):
        raise UserError("this client has no sample to train on: give fewer clients, or other samples")

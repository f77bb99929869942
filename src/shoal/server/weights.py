"""The weights of a parameter server: an engine of one rank, whose gradients come from clients.

They lie in the engine's chunks, its optimizer updates them, and its checkpoints are those that any plan reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm import World
from shoal.comm.reductions import finish
from shoal.elastic.records import Malformed
from shoal.engine import Engine
from shoal.optim.fused.optimizer import OptimizerFactory
from shoal.optim.groups import GroupRule
from shoal.optim.lr import Schedule
from shoal.plan import Option, Plan
from shoal.server.layout import Layout
from shoal.server.ledger import Update
from shoal.server.scaled import at_rate
from shoal.server.sessions import Form

KEPT = 2
"""Checkpoints that are kept."""


class Weights:
    """Weights of `module` under `optimizer`, as in `shoal.Engine`; gradients come encoded by the codec `option`."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        option: Option,
        schedule: Schedule | None = None,
        param_groups: GroupRule | None = None,
    ) -> None:
        self.engine = Engine(
            module,
            _no_loss,
            lambda groups: optimizer(groups),  # hides its options, of which `fused` would be set: as given, to the bit
            Plan(),
            global_batch=1,
            microbatch=1,
            schedule=schedule,
            param_groups=param_groups,
            world=World.single(),
        )
        self._chunks = self.engine.parts.chunks
        self.layout = Layout.of(self._chunks, option)
        self._codec, self._pushed = self.layout.codec, self.layout.pushed()
        self._free: list[list[Tensor]] = []

    def room(self, forms: Sequence[Form]) -> list[Tensor]:
        """Returns memory for a push of these forms. Raises Malformed where no push has them."""
        if list(forms) != self._pushed:
            raise Malformed(f"a gradient in {len(forms)} tensors that do not fit these weights")
        try:
            return self._free.pop()  # several threads may ask
        except IndexError:
            return [torch.empty(form.numel, dtype=form.dtype) for form in forms]

    def decoded(self, raw: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradients of a push, flat as the chunks; without a codec they are views of it."""
        pairs = list(zip(self.layout.trained, raw, strict=True))
        if self._codec.lossless:
            return [data.view(stretch.dtype) for stretch, data in pairs]
        found = [torch.empty(stretch.numel, dtype=stretch.dtype) for stretch, _ in pairs]
        for (_, data), out in zip(pairs, found, strict=True):
            self._codec.decode(data, out)
        return found

    def problem(self, gradients: Sequence[Tensor]) -> str:
        """Returns why no update can be made of these gradients, or ""."""
        largest = [torch.linalg.vector_norm(each, float("inf")) for each in gradients]
        return "" if all(map(torch.isfinite, largest)) else "a gradient that is not finite"

    @torch.no_grad()
    def update(self, update: Update) -> None:
        """Makes an update with the mean of the gradients."""
        engine, first, rest = self.engine, update.gradients[0], update.gradients[1:]
        trained = (chunk for chunk in self._chunks if chunk.trainable)
        for index, chunk in enumerate(trained):
            chunk.gradient.copy_(first.tensors[index])
            for each in rest:
                chunk.gradient.add_(each.tensors[index].to(chunk.gradient.device))
            finish(chunk.gradient, "avg", len(update.gradients))
        untouched = first.untouched.intersection(*(each.untouched for each in rest))
        with at_rate(engine.optimizer.torch, update.weight):
            engine.optimizer.apply(torch.tensor(1.0), None, sorted(untouched & engine.optimizer.known.keys()))
        if engine.scheduler is not None:
            engine.scheduler.step()
        engine.step_index += 1
        if self._codec.lossless:  # the gradients are the memory in which they came
            self._free += [each.tensors for each in update.gradients]

    def asked(self, forms: Sequence[Form]) -> list[Tensor]:
        """Returns memory for what a pull of weights brings, which is nothing. Raises Malformed for anything else."""
        if forms:
            raise Malformed(f"{len(forms)} tensors in a pull of weights")
        return []

    def wrong(self, asked: Sequence[Tensor]) -> str:
        """Returns "": weights are read whole."""
        return ""

    def read(self, asked: Sequence[Tensor], into: list[Tensor]) -> list[Tensor]:
        """Returns the weights, in the memory that an earlier call has returned where it is given."""
        into = into or [torch.empty(each.numel, dtype=each.dtype) for each in self.layout.stretches]
        for chunk, room in zip(self._chunks, into, strict=True):
            room.copy_(chunk.data)
        return into

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint."""
        self.engine.save(directory, keep=KEPT, extra=extra)

    def load(self, directory: Path) -> dict[str, Any]:
        """Reads the newest checkpoint; returns its `extra`."""
        return self.engine.load(directory)

    def to_json(self) -> dict[str, object]:
        """Describes the weights for clients."""
        return self.layout.to_json()

    def close(self) -> None:
        self.engine.close()


def _no_loss(model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
    raise AssertionError("a parameter server runs no forward")

"""The weights of a parameter server: an engine of one rank, whose gradients come from clients.

They lie in the engine's chunks, its optimizer updates them, and its checkpoints are those that any plan reads. Beside
them a job may have tables, of which clients have some rows at a time (see served_table).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal.checkpoint.optimizer_state import optimizer_extra
from shoal.chunks import norms, sum_of_squares
from shoal.chunks.exact import value_of
from shoal.comm import World
from shoal.comm.reductions import finish
from shoal.device import CPU, is_accelerator
from shoal.elastic.records import Malformed
from shoal.engine import Engine
from shoal.module.batchnorm import RunningStatistics
from shoal.optim.fused.optimizer import OptimizerFactory
from shoal.optim.groups import GroupRule
from shoal.optim.lr import Schedule
from shoal.plan import Option, Plan
from shoal.server.layout import Layout
from shoal.server.ledger import Gradient, Update
from shoal.server.scaled import at_rate
from shoal.server.served_table import Pushed, ServedTable, gather
from shoal.server.sessions import Form, memory, same_kind
from shoal.server.sharing import KEPT, shared_checkpoint
from shoal.server.table import not_finite

T = TypeVar("T")


class Weights:
    """The weights of `engine`, on its device; gradients come encoded by the codec `option`.

    clip: the largest norm of an update's gradient.
    kept: checkpoints that are kept. about: returns what they record beside the server's state.
    tables: the parameters that are served by rows, which the engine has not. part: the folder of what this server
        writes of a checkpoint by itself, where there are tables.
    """

    def __init__(
        self,
        engine: Engine,
        option: Option,
        clip: float | None = None,
        kept: int = KEPT,
        about: Callable[[], Mapping[str, Any]] = dict,
        tables: Sequence[ServedTable] = (),
        part: Path | None = None,
    ) -> None:
        self.engine, self._clip, self._kept, self._about = engine, clip, kept, about
        self.tables, self._part = tables, part
        self._chunks = engine.parts.chunks
        self._statistics = RunningStatistics(engine.module)
        self.layout = Layout.of(self._chunks, option, self._statistics.numel)
        self._codec, self._pushed = self.layout.codec, self.layout.pushed()
        self._free: list[list[Tensor]] = []
        self.norm: float | None = None
        """The norm of the mean gradient of the last update, before clipping; None where nothing is clipped."""
        self.rate = 0.0
        """The learning rate of the last update."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizer: OptimizerFactory,
        option: Option,
        schedule: Schedule | None = None,
        param_groups: GroupRule | None = None,
        device: torch.device = CPU,
    ) -> Weights:
        """Holds the weights of `module` under `optimizer`, as in `shoal.Engine`, on `device`."""
        engine = Engine(
            module,
            _no_loss,
            lambda groups: optimizer(groups),  # hides its options, of which `fused` would be set: as given, to the bit
            Plan(),
            global_batch=1,
            microbatch=1,
            schedule=schedule,
            param_groups=param_groups,
            world=World.single(device),
        )
        return cls(engine, option)

    def room(self, forms: Sequence[Form]) -> list[Tensor]:
        """Returns memory for a push of these forms. Raises Malformed where no push has them."""
        whole, pairs = list(forms[: len(self._pushed)]), _pairs(forms[len(self._pushed) :])
        if not same_kind(whole, self._pushed) or len(forms) != len(whole) + 2 * len(self.tables):
            raise Malformed(f"a gradient in {len(forms)} tensors that do not fit these weights")
        rows = [each for table, pair in zip(self.tables, pairs, strict=True) for each in table.room(pair)]
        try:
            return [*self._free.pop(), *rows]  # several threads may ask
        except IndexError:
            return [*memory(whole, self.device), *rows]

    def decoded(self, raw: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradients of a push, flat as the chunks, what it adds to statistics, and of each table rows and
        their gradients; without a codec they are views of it where it is on the device. They are decoded there, so that
        the journal gives the same bits."""
        pushed = zip(self.tables, _pairs(raw[len(self._pushed) :]), strict=True)
        raw = [each.to(self.device) for each in raw[: len(self._pushed)]]
        beside = [each.view(torch.float64) for each in raw[len(self.layout.trained) :]]
        beside += [each for table, pair in pushed for each in table.decoded(pair)]
        pairs = list(zip(self.layout.trained, raw, strict=False))
        if self._codec.lossless:
            return [data.view(stretch.grad_form.dtype) for stretch, data in pairs] + beside
        device = self.engine.device
        found = [torch.empty(stretch.numel, dtype=stretch.grad_dtype, device=device) for stretch, _ in pairs]
        for (_, data), out in zip(pairs, found, strict=True):
            self._codec.decode(data, out)
        return found + beside

    def problem(self, gradients: Sequence[Tensor]) -> str:
        """Returns why no update can be made of these gradients, or ""."""
        wrong = [not_finite(each) for each in gradients[: len(self._pushed)]]
        wrong += [table.problem(pushed) for table, pushed in zip(self.tables, self._of_tables(gradients), strict=True)]
        return next(filter(None, wrong), "")

    def _of_tables(self, gradients: Sequence[Tensor]) -> list[Pushed]:
        return [(rows, values) for rows, values in _pairs(gradients[len(self._pushed) :])]

    @torch.no_grad()
    def update(self, update: Update) -> None:
        """Makes an update with the mean of the gradients, by their counts. Where nothing counts it only counts as a
        step, as in an engine."""
        self.mean(update)
        self.apply(update, self.clipped(self.squares()) if self.clips else torch.tensor(1.0))

    def dropped(self, push: Gradient) -> None:
        """Does nothing: a push that no update is made of is nowhere else."""

    def mean(self, update: Update) -> None:
        """Computes the mean of the gradients, by their counts."""
        counts = [each.count for each in update.gradients]
        for index, chunk in enumerate(chunk for chunk in self._chunks if chunk.trainable):
            _mean(chunk.gradient, [each.tensors[index] for each in update.gradients], counts)
        pushes = [self._of_tables(each.tensors) for each in update.gradients]
        for index, table in enumerate(self.tables):
            table.mean([each[index] for each in pushes], counts)

    def squares(self) -> Tensor:
        """Returns the squared norm of the mean, as an exact sum (see chunks.exact)."""
        pieces = [piece for chunk in self._chunks if chunk.trainable for piece in chunk.norm_pieces()]
        whole = sum_of_squares(norms(pieces), self.engine.device)
        return torch.stack([whole, *(table.squares() for table in self.tables)]).sum(0)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def clips(self) -> bool:
        return self._clip is not None

    def clipped(self, squares: Tensor) -> Tensor:
        """Returns by what the mean is clipped, whose squared norm is given."""
        assert self._clip is not None
        norm = value_of(squares).sqrt()
        self.norm = float(norm)
        return (self._clip / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def apply(self, update: Update, factor: Tensor) -> None:
        """Makes the update with `factor` times the mean that was computed."""
        engine, first, rest = self.engine, update.gradients[0], update.gradients[1:]
        factor = factor.to(engine.device)
        for each in update.gradients if self.layout.statistics else ():  # as if their forwards had come one by one
            self._statistics.begin()
            self._statistics.commit(each.tensors[len(self.layout.trained)])
        self.rate = float(engine.optimizer.torch.param_groups[0]["lr"]) * update.weight
        untouched = first.untouched.intersection(*(each.untouched for each in rest))
        if any(each.count for each in update.gradients):
            with at_rate(engine.optimizer.torch, update.weight):
                engine.optimizer.turn = engine.step_index
                engine.optimizer.apply(factor, None, sorted(untouched & engine.optimizer.known.keys()))
                engine.optimizer.settle()
            for table in self.tables:
                table.apply(factor, self.rate)
        if engine.scheduler is not None:
            engine.scheduler.step()
        engine.step_index += 1
        if self._codec.lossless and not is_accelerator(engine.device):  # they are the memory in which they came
            self._free += [each.tensors[: len(self._pushed)] for each in update.gradients]

    def asked(self, forms: Sequence[Form]) -> list[Tensor]:
        """Returns memory for what a pull of weights brings, which is nothing. Raises Malformed for anything else."""
        if forms:
            raise Malformed(f"{len(forms)} tensors in a pull of weights")
        return []

    def wrong(self, asked: Sequence[Tensor]) -> str:
        """Returns "": weights are read whole."""
        return ""

    def read(self, asked: Sequence[Tensor], into: list[Tensor], device: torch.device) -> list[Tensor]:
        """Returns weights, on `device`, and statistics, in the memory that an earlier call has returned where it is
        given."""
        into = into or self.layout.weights_on(device)
        for chunk, room in zip(self._chunks, into, strict=False):
            room.copy_(chunk.data)
        if self.layout.statistics:
            into[-1].copy_(self._statistics.values())
        return into

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint."""
        if not self.tables:
            self.engine.save(directory, keep=self._kept, extra={**self._about(), **extra})
            return
        assert self._part is not None
        self.save_part(self._part, extra)
        gather(self.tables, [self._part], self.engine.step_index, directory, self._kept)

    def save_part(self, folder: Path, extra: Mapping[str, Any]) -> None:
        """Writes what this server has of a checkpoint, the tables first: weights are there once all is."""
        (group,) = optimizer_extra(self.engine.optimizer, None)["groups"][:1]
        for table in self.tables:
            table.save(folder, self.engine.step_index, group)
        self.engine.save(folder, keep=KEPT, extra={**self._about(), **extra})

    def load(self, directory: Path) -> dict[str, Any]:
        """Reads the newest checkpoint that this server has written by itself; returns its `extra`."""
        extra = self.engine.load(directory)
        for table in self.tables:
            table.load_own(directory, self.engine.step_index)
        return extra

    def resume(self, path: Path) -> None:
        """Reads the checkpoint of a run, whoever wrote it."""
        self.engine.load(path)
        for table in self.tables:
            table.load(path)

    def load_parts(self, parts: Sequence[Path]) -> dict[str, Any]:
        """Reads the checkpoints of several servers that have all parameters between them; returns the `extra` of the
        first."""
        return self.engine.load(shared_checkpoint(parts))

    def to_json(self) -> dict[str, object]:
        """Describes the weights for clients."""
        return self.layout.to_json()

    @property
    def shares(self) -> list[int]:
        """How many parameters each server has."""
        whole = sum(math.prod(layout.shape) for layout in self.engine.layouts.values())
        return [whole + sum(table.numel for table in self.tables)]

    def close(self) -> None:
        self.engine.close()


def _pairs(tensors: Sequence[T]) -> list[Sequence[T]]:
    return [tensors[index : index + 2] for index in range(0, len(tensors), 2)]


def _mean(into: Tensor, gradients: Sequence[Tensor], counts: Sequence[float]) -> None:
    """Writes the mean of `gradients`, weighted by `counts`; of equal counts the bits of an all-reduce."""
    if len(set(counts)) == 1:
        into.copy_(gradients[0])
        for each in gradients[1:]:
            into.add_(each.to(into.device))
        finish(into, "avg", len(gradients))
        return
    into.zero_()
    for each, count in zip(gradients, counts, strict=True):
        into.add_(each.to(into.device), alpha=count)
    into.div_(sum(counts))


def _no_loss(model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
    raise AssertionError("a parameter server runs no forward")

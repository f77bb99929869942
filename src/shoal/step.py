"""One step: the microbatches of a global batch, then reduce -> ballot -> clip -> vote -> apply.

The loss gives (sum, count), so a step's numbers do not depend on how its samples were split: the objective is the sum of all sums
over the sum of all counts. Before backward each sum is divided by a power of two near the expected count, so that low precision
does not overflow; the exact factor comes with the clip coefficient in one multiplication. The power of two cancels exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.batchnorm import RunningStatistics
from shoal.buffers import OtherBuffers
from shoal.comm import Group
from shoal.data import Batch
from shoal.errors import TrainingError, UserError
from shoal.exchange.reducer import Reducer
from shoal.optimizer import ChunkOptimizer
from shoal.random import Randomness, keyed_functional

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Any]


def microbatches(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """The fixed cut of a global batch: `size` samples each, the last one shorter. It never depends on the number of ranks."""
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def share(number: int, rank: int, size: int) -> range:
    """Which of `number` microbatches `rank` runs: a contiguous run, the first ranks one more where it does not divide."""
    each, more = divmod(number, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


@dataclass(frozen=True)
class Sums:
    """What a loss returned for one microbatch, checked: sum and count as fp64 scalars, auxiliary means by name."""

    total: Tensor
    count: Tensor
    aux: dict[str, Tensor]


def call_loss(loss: Loss, module: nn.Module, microbatch: Mapping[str, Tensor]) -> Sums:
    """Runs `loss` and checks its contract; UserError says what it returned instead."""
    result = loss(module, microbatch)
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise UserError(f"loss returned {_describe(result)}: return (sum, count), or (sum, count, auxiliary losses by name)")
    total, count = result[0], torch.as_tensor(result[1])
    if not isinstance(total, Tensor) or total.dim() != 0 or count.dim() != 0:
        raise UserError(
            f"loss returned ({_describe(result[0])}, {_describe(result[1])}): both must be single numbers (use reduction='sum')"
        )
    aux = {}
    for name, value in sorted(result[2].items() if len(result) == 3 else ()):
        value, weight = value if isinstance(value, tuple) else (value, 1.0)
        aux[name] = value / weight
    return Sums(total, count.to(total.device), aux)


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@dataclass
class StepResult:
    """What a step did, the same on every rank. Reading a number waits for the device, not reading costs nothing.

    `loss`: mean over the global batch, without auxiliary losses (those are in `aux`). `grad_norm`: before clipping. `tokens`: the global
    count. `lr`: of each optimizer group. `seconds`: of this rank's call.
    """

    step: int
    epoch: int
    lr: tuple[float, ...]
    seconds: float
    _totals: Tensor
    _norm: Tensor
    _aux_names: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> int:
        return round(float(self._totals[1]))

    @property
    def loss(self) -> float:
        count = float(self._totals[1])
        return float(self._totals[0]) / count if count else math.nan

    @property
    def grad_norm(self) -> float:
        return float(self._norm)

    @property
    def aux(self) -> dict[str, float]:
        values = self._totals[2:].tolist()
        return {name: value / max(1, self.tokens) for name, value in zip(self._aux_names, values, strict=False)}


class StepRunner:
    """Runs steps on this rank's share of each global batch. `whole` makes each rank's share one microbatch, as SyncBN needs."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: ChunkOptimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        reducer: Reducer,
        randomness: Randomness,
        group: Group,
        *,
        microbatch: int,
        whole: bool,
        clip: float | None,
        device: torch.device,
        keyed: bool,
    ) -> None:
        self._module, self._loss = module, loss
        self._optimizer, self._scheduler, self._reducer, self._randomness = optimizer, scheduler, reducer, randomness
        self._group, self._ledger = group, group.ledger
        self._microbatch, self._whole, self._clip, self._device, self._keyed = microbatch, whole, clip, device, keyed
        self._statistics, self._buffers = RunningStatistics(module), OtherBuffers(module)
        self._aux_names: tuple[str, ...] | None = None
        self._per_sample = 1.0  # counts seen a sample, the expectation for the next step
        self._agreed = False
        self._reduced_norm = torch.zeros((), dtype=torch.float64)
        self._unread: StepResult | None = None

    def cut(self, ids: Sequence[int]) -> tuple[list[Sequence[int]], int]:
        """This rank's microbatches of a global batch, and how many the ranks after it have."""
        if self._whole:
            mine = share(len(ids), self._group.rank, self._group.size)
            return [ids[mine.start : mine.stop]], 0
        pieces = microbatches(ids, self._microbatch)
        mine = share(len(pieces), self._group.rank, self._group.size)
        return [pieces[i] for i in mine], len(pieces) - mine.stop

    def load(self, batch: Batch, ids: Sequence[int]) -> dict[str, Tensor]:
        """The samples `ids` on the device; none of them as a batch of zero samples."""
        if not ids:
            return {key: value[:0].to(self._device) for key, value in batch.load(batch.ids[:1]).items()}
        return {key: value.to(self._device, non_blocking=True) for key, value in batch.load(ids).items()}

    def run(self, batch: Batch) -> StepResult:
        """Forward, backward, exchange, clip, vote, apply. Raises TrainingError, with the weights of the step before, on NaN."""
        started = time.perf_counter()
        self.settle()
        self._module.train()
        expected = 2.0 ** round(math.log2(max(1.0, self._per_sample * len(batch.ids))))
        mine, after = self.cut(batch.ids)
        totals = self._accumulate(batch, mine, expected)
        totals, untouched = self._reduce(totals, len(mine), after)
        norm, factor = self._clip_factor(totals[1], expected)
        lr = tuple(float(group["lr"]) for group in self._optimizer.torch.param_groups)
        result = StepResult(batch.step, batch.epoch, lr, 0.0, totals, norm, self._aux_names or ())
        with self._ledger.span("compute", "optimizer"), torch.no_grad():
            self._vote_and_apply(result, factor, untouched)
        if self._device.type != "cuda":
            self._per_sample = max(1e-6, result.tokens / len(batch.ids))
        result.seconds = time.perf_counter() - started
        return result

    def _accumulate(self, batch: Batch, mine: Sequence[Sequence[int]], expected: float) -> Tensor:
        """Backward of each microbatch; returns (sum, count, auxiliary numerators ...) of this rank, fp64."""
        self._reducer.begin()
        self._statistics.begin()
        self._buffers.begin()
        totals = torch.zeros(2 + len(self._aux_names or ()), dtype=torch.float64, device=self._device)
        for index, ids in enumerate(mine):
            with self._ledger.span("compute", "load"):
                microbatch = self.load(batch, ids)
            self._randomness.begin(batch.step, ids)
            try:
                with keyed_functional(self._randomness) if self._keyed else nullcontext():
                    with self._ledger.span("compute", "forward"):
                        sums = call_loss(self._loss, self._module, microbatch)
                    self._randomness.replay()
                    with self._ledger.span("compute", "backward"):
                        self._backward(sums, expected, last=index == len(mine) - 1)
            except Exception as error:
                shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in microbatch.items())
                error.add_note(f"in step {batch.step}, microbatch {index + 1} of {len(mine)} on this rank: {shapes}")
                raise
            totals = self._add(totals, sums)
        return totals

    def _backward(self, sums: Sums, expected: float, last: bool) -> None:
        objective = sums.total / expected
        for value in sums.aux.values():
            objective = objective + value * (sums.count / expected)
        with self._reducer.last_backward() if last else nullcontext():
            objective.backward()

    def _add(self, totals: Tensor, sums: Sums) -> Tensor:
        names = tuple(sums.aux)
        if self._aux_names is None:
            self._aux_names = names
            totals = torch.cat([totals, totals.new_zeros(len(names))])
        elif names != self._aux_names:
            raise UserError(
                f"loss returned the auxiliary losses {names}, before it was {self._aux_names}: return the same each time"
            )
        row = [sums.total.detach(), sums.count, *(value.detach() * sums.count for value in sums.aux.values())]
        return totals + torch.stack([item.double() for item in row])

    def _reduce(self, totals: Tensor, run_here: int, after: int) -> tuple[Tensor, list[str]]:
        """The exchange ends, then one ballot carries the sums, rank 0's norm (kernels of unlike hosts may differ in the last bit), which
        parameters were touched, whether buffers changed, and running statistics.

        That every rank came to the ballot is the vote that all of them got through the step.
        """
        touched = list(self._reducer.touched.values())
        self._reducer.finish()
        if self._group.size == 1:
            self._reduced_norm = self._norm()
            return totals, [name for name, seen in self._reducer.touched.items() if not seen]
        if not self._agreed:
            totals = self._agree_on_names(totals)
        flags = torch.tensor([*touched, self._buffers.changed()], dtype=torch.float64)
        flags = flags.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else flags
        norm = self._norm() if self._group.rank == 0 else torch.zeros((), dtype=torch.float64, device=self._device)
        parts = [totals, norm.view(1), flags]
        if len(self._statistics) and not self._whole:
            parts.append(self._statistics.term(run_here, after))
        ballot = self._group.all_reduce(torch.cat(parts), purpose="ballot")
        totals, norm, flags, *statistics = ballot.split([len(part) for part in parts])
        self._reduced_norm = norm[0]
        if statistics:
            self._statistics.commit(statistics[0])
        if len(self._buffers) and flags[-1] > 0:
            self._buffers.merge(self._group, run_here)
        if all(touched):
            return totals, []
        return totals, [name for name, ranks in zip(self._reducer.touched, flags.tolist(), strict=False) if ranks == 0]

    def _agree_on_names(self, totals: Tensor) -> Tensor:
        """At the first step: a rank without a microbatch learns the names of the auxiliary losses from the others."""
        self._agreed = True
        names = next((n for n in self._group.all_gather_object(self._aux_names) if n is not None), ())
        if self._aux_names is None:
            self._aux_names = names
            totals = torch.cat([totals, totals.new_zeros(len(names))])
        return totals

    def _norm(self) -> Tensor:
        """2-norm of the accumulated, reduced gradients of all chunks."""
        return torch.linalg.vector_norm(torch.stack(self._reducer.norms).double())

    def _clip_factor(self, count: Tensor, expected: float) -> tuple[Tensor, Tensor]:
        """The gradient's global norm, and what the accumulated gradients are multiplied with: exact mean and clipping."""
        to_mean = expected / count.clamp(min=1e-300)
        norm = self._reduced_norm * to_mean
        if self._clip is None:
            return norm, to_mean
        return norm, to_mean * (self._clip / (norm + 1e-6)).clamp(max=1.0)

    def _vote_and_apply(self, result: StepResult, factor: Tensor, untouched: list[str]) -> None:
        """Applies the update if loss and norm are finite: they are the same bits on every rank, so all vote alike."""
        if self._device.type == "cuda" and self._optimizer.skips_on_device:
            good = torch.isfinite(result._norm) & torch.isfinite(result._totals[0]) & (result._totals[1] > 0)
            self._optimizer.apply(factor, (~good).float(), untouched)
            self._unread = result
        elif result.tokens == 0:
            pass  # every label of the global batch is ignored: there is no mean, and nothing to learn from
        else:
            self._require_finite(result)
            self._optimizer.apply(factor, None, untouched)
        if self._scheduler is not None:
            self._scheduler.step()

    def settle(self) -> None:
        """Raises what a step left unread on the device."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._require_finite(unread)

    def _require_finite(self, result: StepResult) -> None:
        if result.tokens == 0 or (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            return
        self._statistics.restore()
        what = (
            f"the loss is {result.loss}"
            if not math.isfinite(result.loss)
            else f"the gradient norm is {result.grad_norm} (the loss is {result.loss:.6g})"
        )
        # In the order in which gradients come: the first is nearest to the cause.
        broken = [name for name in reversed(self._optimizer.parameters) if not torch.isfinite(self._optimizer.grad(name)).all()]
        weights = [name for name, value in self._optimizer.parameters.items() if not torch.isfinite(value).all()]
        where = (
            f"first parameter with a gradient that is not finite: {broken[0]} ({len(broken)} of {len(self._optimizer.parameters)})"
            if broken
            else "gradients are finite"
        )
        if weights:
            where += f"; weights already not finite: {weights[0]}"
        raise TrainingError(
            f"step {result.step}: {what}; {where}. The update was not applied. A lower learning rate, a longer warm-up, clipping, or "
            "the data of this step are the usual places to look"
        )

"""Steps without a flush: microbatches of the next step are on their way while the last ones of this step come back (PipeDream, 2BW).

With n updates made, the weights are version n. The forward of step t takes version t - delay, its backward the same again, and its update is made from version t: so

    2bw         delay 1 on every stage       W(t+1) = W(t) - lr * grad f_t(W(t-1))          Narayanan et al. 2021, arXiv 2006.09503
    pipedream   delay p - 1 - s on stage s   a step is one microbatch, and each stage updates as soon as its gradient is there        Narayanan et al. 2019 (SOSP)
                vertical_sync: p - 1 on all

A step's update is made at the end of the call `delay` steps later, by when all its backwards are over here. 2bw waits for nobody then: while the next step went on, its gradients have been reduced
beside it, and so were the sums and the norm of all stages, by which it is clipped and voted on as in one process. Stages of pipedream update at different times: each clips and votes by its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.chunks import value_of
from shoal.chunks.versions import Versions
from shoal.comm import Group, Lane
from shoal.comm.lane import Ticket
from shoal.data import Batch
from shoal.errors import UserError
from shoal.exchange.aside import Aside
from shoal.module.batchnorm import has_batch_statistics
from shoal.parallel.parallelized import Parted
from shoal.plan import Plan, option_name
from shoal.precision import Precision
from shoal.training.result import StepResult
from shoal.training.stages import Training, kind_of
from shoal.training.step import StepRunner


@dataclass
class Step:
    """A step under way. `version`: of the weights that it sees; `left`: backwards to come; `counted`, `after`: microbatches here, and on the replicas behind this one; `scale`: of its loss."""

    batch: Batch
    version: int
    left: int
    counted: int
    after: int
    scale: Tensor | None
    sums: Tensor  # of the loss, as in StepRunner, and what it was expected to count
    experts: Sequence[Tensor] = ()  # counts of tokens, as in StepResult
    told: Ticket | None = None  # when the sums are those of all ranks
    asked: Ticket | None = None  # when `answer` is there
    answer: tuple[Tensor, Tensor, list[str]] | None = None


def check_unflushed(plan: Plan, precision: Precision, parted: Parted, replicas: int, sync_bn: bool, tied: bool) -> None:
    """UserError for what does not go with a schedule without a flush. `tied`: stages share weights."""
    name = option_name(plan.schedule, "schedule")
    each = name == "pipedream"
    reasons = {
        "plan.zero = 2 keeps no whole gradient": plan.zero >= 2,
        "ranks that send each other tokens (plan.ep) run their forwards together": plan.ep > 1,
        "routers that balance by a bias (balance_rate) follow the counts at the end of a step": parted.moves_biases,
        "sync_bn, and BatchNorm on several replicas, agree at the end of a step": sync_bn
        or (replicas > 1 and has_batch_statistics(parted.built.module)),
        f"masters that rest ({precision.keep}) lie in the weights": precision.keep != "whole",
        "its stages update at different times, and the loss scale is of all": each and precision.scaling is not None,
        "its stages update at different times, and some of them share weights": each and tied,
    }
    why = next((reason for reason, so in reasons.items() if so), None)
    if why is not None:
        raise UserError(f'plan.schedule = "{name}" has no flush: {why}. Take one with a flush, such as 1f1b, or leave that out')


class Unflushed(StepRunner):
    """Steps of a schedule without a flush. `versions`: of the weights here; `delay` as above. `together`: whether all stages clip and vote as one. `telling`: groups of this rank's replicas and
    of its pipeline, for results alone."""

    def __init__(self, *args: Any, versions: Versions, delay: int, together: bool, telling: Sequence[Group], **more: Any) -> None:
        super().__init__(*args, **more)
        assert self._stages is not None
        self._versions, self._delay, self._together, self._telling = versions, delay, together, telling
        self._stream = self._stages.stream()
        self._waits = 1 if together else self._stream.behind
        self._reducer.detach()
        self._aside = Aside(self._parameters, self._algorithm.replica.chunks)
        self._results, self._ballots = Lane(self._device, self._ledger), Lane(self._device, self._ledger)
        self._steps: deque[Step] = deque()
        self._counted, self._tally = self._tally, None  # counts are told with the loss of their step, not with an update

    def run(self, batch: Batch) -> StepResult:
        """The forwards of `batch`, and the backwards and the update that are due. The result's loss is that of `batch`; its norm and scale are those of the update that was made, of an earlier
        step (NaN where there was none yet). Raises TrainingError, with the weights before that update, on NaN."""
        started = time.perf_counter()
        self._module.train()
        lr = tuple(float(group["lr"]) for group in self._optimizer.torch.param_groups)
        step = self._forwards(batch)
        self._steps.append(step)
        made: StepResult | None = None
        while len(self._steps) > self._waits:
            made = self._update()
        self._hand_over_the_next()
        norm = torch.full((), math.nan) if made is None else made._norm
        scale = None if made is None else made._scale
        result = StepResult(
            batch.step, batch.epoch, lr, 0.0, step.sums[:-1], norm, self._aux_names or (), 1.0, scale, step.experts, step.told
        )
        result.seconds = time.perf_counter() - started
        return result

    def _forwards(self, batch: Batch) -> Step:
        """Those of `batch`, each followed by the oldest backward there is."""
        assert self._stages is not None
        mine, after, most, self._samples = self.cut(batch.ids)
        if not self._together and most > 1:
            raise UserError(
                f'plan.schedule = "pipedream" updates after each microbatch, and this step has {most} of them on a rank: make global_batch = microbatch x dp, or take "2bw"'
            )
        self._ledger.step = self._step = batch.step
        self._expected = self._near(self.per_sample * len(batch.ids))
        self._totals = torch.zeros(2 + len(self._aux_names or ()), dtype=torch.float64, device=self._device)
        work = Training(self, batch, [(ids, True) for ids in mine], self._randomness)
        kinds = [kind_of(each, "train") for each in work.loaded]
        self._stages.learn(kinds, work.try_out, None, work.trying)
        scale = None if self._scale is None else self._scale.scale.clone()
        step = Step(batch, batch.step - self._delay, len(mine), len(mine), after, scale, self._totals)
        pending = [*self._steps, step]
        self._buffers.begin()
        if self._counted is not None:
            self._counted.begin()
        for place, kind in enumerate(kinds):
            self._versions.bind(step.version)
            self._stream.feed(kind, work, place)
            if self._stream.under_way > self._stream.behind:
                self._back(pending)
        if self._partners.size > 1 and self._buffers.changed():
            raise UserError(
                "a forward writes to a buffer of the model, on which replicas agree at the end of a step: take a schedule with a flush, such as 1f1b, or plan.dp = 1"
            )
        if not self._agreed:
            self._totals = self._agree_on_names(self._totals)
        self._tell(step)
        return step

    def flush(self) -> None:
        """Makes all updates that are due, also of steps that are under way. What later steps compute does not depend on whether, or when, that was done."""
        while self._steps:
            self._update()
        self._versions.bind(self._versions.newest)

    @contextmanager
    def reducing(self, last: bool, complete: Collection[str] | None = None) -> Iterator[None]:
        with self._ledger.span("compute", "backward"):
            yield

    def _back(self, steps: Sequence[Step]) -> None:
        """The oldest backward; after a step's last one its gradients go out, if those of the step before have been applied."""
        step = next(each for each in steps if each.left)
        self._versions.bind(step.version)
        self._stream.back()
        step.left -= 1
        if not step.left and step is steps[0] and step.told is not None:
            self._hand_over(step)

    def _hand_over_the_next(self) -> None:
        if self._steps and not self._steps[0].left and self._steps[0].asked is None:
            self._hand_over(self._steps[0])

    def _hand_over(self, step: Step) -> None:
        """Gradients are reduced from here on, beside the computation, and agreed on."""
        number, holds = step.batch.step, self._algorithm.holds(step.batch.step)
        self._algorithm.begin(number)
        self._reducer.begin(number, 1, None if step.scale is None else step.scale.reciprocal())
        self._statistics.begin()
        self._reducer.hand_over(self._aside.flats, self._aside.touched)
        self._aside.clear()

        def ask() -> None:
            assert step.told is not None
            step.told.wait("results")
            sums = step.sums[:-1] if self._partners.rank == 0 else torch.zeros_like(step.sums[:-1])
            with torch.no_grad():
                step.answer = self._reduce(sums, step.counted, step.after, holds)

        step.asked = self._ballots.submit(ask, "ballot")

    def _tell(self, step: Step) -> None:
        """The sums of `step` go from the last stage to all ranks, and what each stage has counted of its experts."""
        assert self._stages is not None
        first = self._stages.is_last and self._partners.rank == 0
        expected = torch.full((1,), self._expected if first else 0.0, dtype=torch.float64, device=self._device)
        told = torch.cat([self._totals, expected, *([] if self._counted is None else [self._counted.row()])])
        step.sums = told[: len(self._totals) + 1]
        step.experts = () if self._counted is None else self._counted.read(told[len(step.sums) :])

        def tell() -> None:
            for group in self._telling:
                group.all_reduce(told, purpose="result")

        step.told = self._results.submit(tell, "result")

    def _update(self) -> StepResult:
        """That of the oldest step, which is over with it."""
        step = self._steps[0]
        while step.left:
            self._back(self._steps)
        if step.asked is None:
            self._hand_over(step)
        assert step.asked is not None
        step.asked.wait("ballot")
        assert step.answer is not None
        totals, squares, untouched = step.answer
        number, holds = step.batch.step, self._algorithm.holds(step.batch.step)
        norm, factor = self._clip_factor(number, totals[1], squares, float(step.sums[-1]), holds)
        lr = tuple(float(group["lr"]) for group in self._optimizer.torch.param_groups)
        result = StepResult(number, step.batch.epoch, lr, 0.0, totals, norm, self._aux_names or (), 1.0, step.scale)
        self._steps.popleft()
        with self._ledger.span("compute", "optimizer"), torch.no_grad(), self._versions.opened():
            self._vote_and_apply(result, factor, untouched, holds)
            if result.skipped or result.tokens == 0:
                for chunk in self._algorithm.replica.chunks:
                    chunk.publish()
            self._algorithm.end(number)
        self.per_sample = max(1e-6, result.tokens / max(1, len(step.batch.ids)))
        return result

    # what all stages would say together

    def _of_all_stages(self, totals: Tensor, *counts: Tensor) -> Tensor:
        return totals  # they have been told

    def _norm_squared(self, squares: Tensor) -> Tensor:
        if self._together:
            return super()._norm_squared(squares)
        return value_of(squares if self._beside is None else self._beside.all_reduce(squares, purpose="norm"))

    def _of_all_owners(self, names: list[str]) -> list[str]:
        return super()._of_all_owners(names) if self._together else names

    def close(self) -> None:
        """Ends what goes on beside the steps; steps under way are lost, but not the results that were given."""
        self._results.close()
        for group in (self._beside, self._across, *self._telling):
            if group is not None:  # another stage may have closed before it came there
                group.close()
        self._ballots.close()

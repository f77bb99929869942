"""Steps without a flush: microbatches of the next step are on their way while the last ones of this step come back
(PipeDream, 2BW).

With n updates made, the weights are version n. The forward of step t takes version t - delay, its backward the same
again, and its update is made from version t: so

    2bw         delay 1 on every stage: W(t+1) = W(t) - lr * grad f_t(W(t-1))
                Narayanan et al. 2021, arXiv 2006.09503
    pipedream   delay p - 1 - s on stage s, with vertical_sync p - 1 on all: a step is one microbatch, and each stage
                updates as soon as its gradient is there
                Narayanan et al. 2019 (SOSP)

A step's update is made at the end of the call `delay` steps later, by when all its backwards are over here. 2bw waits
for nobody then: while the next step went on, its gradients have been reduced beside it, and so were the sums and the
norm of all stages, by which it is clipped and voted on as in one process. Stages of pipedream update at different
times: each clips and votes by its own.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.chunks.versions import Versions
from shoal.comm import Group, Lane
from shoal.data import Batch
from shoal.device import CPU, is_accelerator, record_use
from shoal.errors import UserError
from shoal.exchange import Holds
from shoal.parallel.axis import Axis
from shoal.pipeline import Action, Endless
from shoal.pipeline import Runner as Pipeline
from shoal.training.ballot import Ballot, agree
from shoal.training.clip import Clip, ClipSettings
from shoal.training.commit import Commit
from shoal.training.forward import Forward
from shoal.training.microbatches import Dealing, with_idle
from shoal.training.reduce import ReduceAside
from shoal.training.result import StepResult
from shoal.training.setup import StepGroups, Trained
from shoal.training.stages import Staged
from shoal.training.totals import Totals
from shoal.training.under_way import Microbatch, Step, UnderWay


@dataclass(frozen=True)
class Delays:
    """How steps overlap.

    - `versions`: of the weights on this stage
    - `delay`: by how many versions the weights of a step are older than those that it updates
    - `together`: all stages clip and vote as one
    - `telling`: groups of this rank's replicas and of its pipeline, for results alone
    - `sharing`: axes along which ranks share weights, over groups for this alone
    """

    versions: Versions
    delay: int
    together: bool
    telling: Sequence[Group]
    sharing: Sequence[Axis] = ()


class NoFlushRunner:
    """Runs steps of a schedule without a flush; parameters as of StepRunner."""

    def __init__(
        self,
        forward: Forward,
        dealing: Dealing,
        groups: StepGroups,
        trained: Trained,
        clipping: ClipSettings,
        pipeline: Pipeline,
        delays: Delays,
    ) -> None:
        self.forward, self.dealing = forward, dealing
        self._effects, self._groups, self._trained, self._delays = forward.effects, groups, trained, delays
        device = self._device = forward.randomness.device
        self._pipeline = pipeline
        self._totals = Totals(device, trained.scale, pipeline.is_last)
        self._reduce = ReduceAside(forward, trained, self._totals)
        self.accumulate = Staged(forward, self._totals, self._reduce, pipeline)
        inside = [axis for axis in groups.axes if not axis.cuts_layers]
        agreeing = groups if delays.together else replace(groups, axes=inside)
        self._ballot = Ballot(forward, agreeing, trained.hooks, told=True)
        self._clip = Clip(clipping, agreeing, trained.algorithm, device)
        self._commit = Commit(forward, trained, self._reduce, groups if delays.together else None)
        self._order = Endless(pipeline.own[-1], pipeline.behind, 1 if delays.together else pipeline.behind)
        self._microbatches: dict[int, Microbatch] = {}  # those whose backward is to come, by number
        lane = trained.algorithm.replica.lane
        self._results, self._ballots = lane.another(), lane.another()
        # Stages come to what their hosts tell each other steps apart: a thread waits, on accelerators too.
        self._hosts = Lane(CPU, forward.ledger)
        self._steps: deque[Step] = deque()
        self._made: StepResult | None = None  # by the last update of this call
        self._is_whole = True  # no error has left a call in the middle
        self.gradients: list[Tensor] = []
        self.per_sample = 1.0
        self.unreported: StepResult | None = None

    def reported(self) -> None:
        """The caller gets the result of the last step."""

    def run(self, batch: Batch) -> StepResult:
        """The forwards of `batch`, and the backwards and the update that are due.

        The result's loss is that of `batch`; its norm and scale are those of the update that was made, of an earlier
        step (NaN where there was none yet). Raises TrainingError, with the weights before that update, on NaN.
        """
        started = time.perf_counter()
        self._is_whole = False
        self.forward.set_training()
        lr = self._trained.lr
        self._made = None
        step = self._forwards(batch)
        self._steps.append(step)
        self._do(self._order.due())
        assert step.told is not None
        waits: list[Callable[[], object]] = [partial(step.told.wait, "results")]
        norm, scale = torch.full((), math.nan), None
        if self._made is not None:
            norm, scale, waits = self._made._norm, self._made._scale, [*waits, *self._made._waits]
        about = (step.sums[:-1], norm, self._totals.names or (), 1.0, scale, step.experts, waits)
        result = StepResult(batch.step, batch.epoch, lr, 0.0, *about)
        result.seconds = time.perf_counter() - started
        self._is_whole = True
        return result

    def flush(self) -> None:
        """Makes all updates that are due, also of steps that are under way.

        What later steps compute does not depend on whether, or when, that was done.
        """
        self._do(self._order.flush())
        self._delays.versions.bind(self._delays.versions.newest)

    def abandon(self) -> None:
        """Returns that the state is that of no step: some are always under way."""

    def settle(self) -> None:
        """Raises what a step left unread on the device."""
        self._commit.settle()

    def follow(self) -> None:
        raise AssertionError("chunks are not cut anew under a schedule without a flush")

    @property
    def arrivals(self) -> list[str]:
        """The parameters in the order of their gradients: not told, for chunks keep their order."""
        return []

    def close(self) -> None:
        """Ends what goes on beside the steps; steps under way are lost, but not the results that were given.

        On an accelerator they are finished first: streams of other stages wait for them, and nothing can be called off
        there.
        """
        if self._is_whole and is_accelerator(self._device):
            self.flush()
        self._results.close()
        axes = (*self._groups.axes, *self._delays.sharing)
        for group in (*(axis.group for axis in axes), *self._delays.telling):
            group.close()  # another stage may have closed before it came there
        self._ballots.close()
        self._hosts.close()

    def _forwards(self, batch: Batch) -> Step:
        """Runs those of `batch`, each followed by the oldest backward there is."""
        share, delays, totals = self.dealing.cut(batch.ids), self._delays, self._totals
        if not delays.together and share.most > 1:
            raise UserError(
                f'plan.schedule = "pipedream" updates after each microbatch, and this step has {share.most} of them on '
                'a rank: make global_batch = microbatch x dp, or take "2bw"'
            )
        self.forward.ledger.step = batch.step
        totals.begin(self.per_sample * len(batch.ids), self._trained.algorithm.keeps_back)
        work, kinds = self.accumulate.prepare(batch, with_idle(share.microbatches, 0, ()))
        scale = None if totals.scale is None else totals.scale.clone()
        step = Step(batch, batch.step - delays.delay, len(kinds), share.after, scale, totals.values)
        for each in self._effects.of_the_caller:
            each.begin(batch.step)
        self._effects.buffers.begin()
        self._effects.experts.begin()
        self._do(self._order.step(len(kinds)), ((kind, (step, work, index)) for index, kind in enumerate(kinds)))
        if self._groups.partners.size > 1 and self._effects.buffers.changed():
            raise UserError(
                "a forward writes to a buffer of the model, on which replicas agree at the end of a step: take a "
                "schedule with a flush, such as 1f1b, or plan.dp = 1"
            )
        alone = self._trained.algorithm.holds(batch.step) is Holds.INDEPENDENT
        agree(totals, self._effects, self._groups, self.forward.streams, alone)
        self._tell(step)
        return step

    def _do(self, actions: Iterator[Action], new: Iterable[tuple[Any, Microbatch]] = ()) -> None:
        """Does `actions`, whose forwards are of the microbatches `new`, with their kinds."""
        interpreter, microbatches = self._pipeline.interpreter, self._microbatches
        entering, work = iter(new), UnderWay(microbatches, self._hand_over, self._update)
        for action in actions:
            number = action.microbatch
            if action.kind == "F":
                kind, microbatches[number] = next(entering)
                self._pipeline.add(number, kind)
            if action.kind in ("F", "B"):
                self._delays.versions.bind(microbatches[number][0].version)
            interpreter.do(action, work)
            if action.kind == "B":
                interpreter.forget(number)
                del microbatches[number]

    def _tell(self, step: Step) -> None:
        """Sends the sums of `step` from the last stage to all ranks, and what each stage has counted of its experts."""
        first, counts = self._pipeline.is_last and self._groups.partners.rank == 0, self._effects.experts
        expected = torch.full((1,), self._totals.expected if first else 0.0, dtype=torch.float64, device=self._device)
        told = torch.cat([self._totals.values, expected, counts.row()])
        step.sums = told[: len(self._totals.values) + 1]
        step.experts = counts.read(told[len(step.sums) :])

        def tell() -> None:
            for group in self._delays.telling:
                group.all_reduce(told, purpose="result")

        step.told = self._results.submit(tell, "result")

    def _hand_over(self) -> None:
        """Reduces the oldest step's gradients from here on, beside the computation, and agrees on them."""
        step = self._steps[0]
        number = step.batch.step
        alone = self._trained.algorithm.holds(number) is Holds.INDEPENDENT
        self._trained.algorithm.begin(number)
        self._effects.statistics.begin()
        self._reduce.hand_over(number, None if step.scale is None else step.scale.reciprocal())

        def ask() -> None:
            assert step.told is not None
            step.told.wait("results")
            sums = step.sums[:-1] if self._groups.partners.rank == 0 else torch.zeros_like(step.sums[:-1])
            with torch.no_grad():
                reduced = self._reduce.finish()
                step.answer = self._ballot.cast(sums, reduced, step.ran, step.after, alone)
            step.untouched = step.answer.untouched
            step.agreed = self._hosts.submit(partial(self._agree, step, reduced.touched), "ballot")

        step.asked = self._ballots.submit(ask, "ballot")

    def _agree(self, step: Step, here: Collection[str]) -> None:
        """Takes what other stages have reached from the untouched parameters of `step`. `here`: all that are trained
        here."""
        for axis in self._delays.sharing:
            step.untouched = axis.untouched(list(step.untouched), here)

    def _update(self) -> None:
        """Makes the update of the oldest step, which is over with it; raises what the update before left unread."""
        step = self._steps[0]
        assert step.asked is not None
        step.asked.wait("ballot")
        assert step.answer is not None and step.agreed is not None
        step.agreed.wait("ballot")
        record_use(step.answer.totals, step.answer.squares)  # they were made on the lane's stream
        self.settle()
        answer, number, trained = step.answer, step.batch.step, self._trained
        clipped = self._clip.clip(number, answer.totals[1], answer.squares, float(step.sums[-1]))
        about = (answer.totals, clipped.norm, self._totals.names or (), 1.0, step.scale)
        result = StepResult(number, step.batch.epoch, trained.lr, 0.0, *about)
        self._steps.popleft()
        with self.forward.ledger.span("compute", "optimizer"), torch.no_grad(), self._delays.versions.opened():
            self._commit.apply(result, clipped, step.untouched)
            self._commit.share()
            if result.skipped or result.count == 0:
                for chunk in trained.algorithm.replica.chunks:
                    chunk.publish()
            trained.algorithm.end(number)
        if result.count:
            self.per_sample = max(1e-6, result.count / max(1, len(step.batch.ids)))
        self._made = result

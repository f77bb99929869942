"""One step: accumulate the microbatches of a global batch, then reduce -> ballot -> clip -> commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from shoal.chunks import Chunk
from shoal.data import Batch
from shoal.errors import TrainingError
from shoal.exchange import Holds
from shoal.exchange.rounds import Round
from shoal.pipeline import Runner as Pipeline
from shoal.training.ballot import Ballot, agree
from shoal.training.clip import Clip, ClipSettings
from shoal.training.commit import Commit
from shoal.training.forward import Forward
from shoal.training.local import Local
from shoal.training.loss import Sums
from shoal.training.microbatches import Dealing, Run, with_idle
from shoal.training.reduce import Reduce
from shoal.training.result import StepResult
from shoal.training.setup import StepGroups, Trained
from shoal.training.stages import Staged
from shoal.training.totals import Totals


class _Phase(Enum):
    """How far the step has come."""

    BETWEEN = "none is under way"
    OPEN = "gradients come together"
    UPDATING = "weights and the optimizer's state change"
    SHARING = "what this rank owns is updated, and ranks bring their weights together"


class StepRunner:
    """Runs steps on this rank's share of each global batch.

    - `forward`: the forward of a microbatch
    - `dealing`: which microbatches this rank runs
    - `groups`: the ranks that agree on a step
    - `trained`: parameters, optimizer, and how replicas agree
    - `clipping`: how gradients are clipped, kept and told
    - `pipeline`: runs the stages that this rank has, where it has not all
    """

    def __init__(
        self,
        forward: Forward,
        dealing: Dealing,
        groups: StepGroups,
        trained: Trained,
        clipping: ClipSettings,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.forward, self.dealing = forward, dealing
        self._effects, self._groups, self._trained = forward.effects, groups, trained
        device = forward.randomness.device
        self._totals = Totals(device, trained.scale, all(axis.sees_loss for axis in groups.axes))
        self._reduce = Reduce(forward, trained, self._totals, pipeline)
        self._local = Local(forward, self._totals, self._reduce, trained.hooks)
        self.accumulate: Local | Staged = self._local
        if pipeline is not None:
            lockstep = groups.replicas if dealing.lockstep else None
            self.accumulate = Staged(forward, self._totals, self._reduce, pipeline, lockstep)
        self._ballot = Ballot(forward, groups, trained.hooks)
        self._clip = Clip(clipping, groups, trained.algorithm, device)
        self._commit = Commit(forward, trained, self._reduce, groups)
        self.gradients: list[Tensor] = []
        """The part of each chunk's gradient that this rank owns, in the last step and before clipping, where kept."""
        self.per_sample = 1.0
        """Counts seen a sample, the expectation for the next step: saved, so that a resumed run has the same bits."""
        self._step = self._samples = 0
        self._is_tried_out = False
        self._phase = _Phase.BETWEEN
        self.unreported: StepResult | None = None
        """The result of a step whose update is made, until its caller gets it."""

    def run(self, batch: Batch) -> StepResult:
        """Makes one step on `batch`. Raises TrainingError, with the weights of the step before, on NaN."""
        started = time.perf_counter()
        share = self.dealing.cut(batch.ids)
        self.settle()
        alone = self._holds(batch.step) is Holds.INDEPENDENT
        self._samples = sum(len(ids) for ids in share.microbatches) if alone else share.samples
        self.begin(batch.step, share.most, self.per_sample * self._samples, share.alike)
        self.forward.set_training()
        runs = with_idle(share.microbatches, share.most if self.dealing.lockstep else 0, batch.ids[: self.dealing.size])
        self._try_out(batch, runs)
        with self.forward.gather.step(("train", share.most)), self.forward.rows():
            self.accumulate.run(batch, runs)
        result = self._update(batch.epoch, share.after, self._samples / len(batch.ids))
        if self._commit.is_read:
            self._expect(result)
        self._share()
        result.seconds = time.perf_counter() - started
        return result

    def _try_out(self, batch: Batch, runs: Sequence[Run]) -> None:
        """Has axes see the first microbatch of all, where this rank has the whole model, before it counts."""
        if not self._is_tried_out and runs and self.accumulate is self._local:
            self.forward.try_out(batch, runs[0][0])
            self._is_tried_out = True

    def begin(self, step: int, most: int, expected: float, alike: bool = False) -> None:
        """Opens `step`, in which a rank has at most `most` microbatches; `expected`: about the count of all of them;
        `alike`: see Share.

        Raises what the step before left unread on the device.
        """
        self.settle()
        self.forward.ledger.step = self._step = step
        self._totals.begin(expected, self.keeps_back)
        self._reduce.begin(step, most, alike)  # ends what an error has left of the step before
        self._trained.algorithm.begin(step)
        self._effects.begin(step)
        self.forward.intact.forget()
        if self._trained.buddy is not None:
            self._trained.buddy.begin(step)
        self._phase = _Phase.OPEN

    def backward(self, sums: Sums, last: bool) -> None:
        """Backward of one microbatch of a loop that is the caller's (see Local.backward)."""
        self._local.backward(sums, last)

    def end(self, epoch: int, after: int, share: float) -> StepResult:
        """Ends the step: reduce, ballot, clip, commit, and weights come together.

        `after`: microbatches of the partners behind this rank; `share`: see StepResult.
        """
        result = self._update(epoch, after, share)
        self._share()
        return result

    def _update(self, epoch: int, after: int, share: float) -> StepResult:
        step, totals, trained = self._step, self._totals, self._trained
        alone = self._holds(step) is Holds.INDEPENDENT
        reduced = self._reduce.finish()
        self.forward.intact.take_in()
        agree(totals, self._effects, self._groups, self.forward.streams, alone)
        if trained.buddy is not None:
            trained.buddy.log(step, reduced.touched)
        answer = self._ballot.cast(totals.values, reduced, totals.ran, after, alone)
        clipped = self._clip.clip(step, answer.totals[1], answer.squares, totals.expected)
        if self._clip.pull is not None:
            self._reduce.every_row()
        self.gradients = clipped.gradients
        about = (answer.totals, clipped.norm, totals.names or (), share, totals.scale, answer.experts)
        result = StepResult(step, epoch, trained.lr, 0.0, *about, norms=clipped.norms, _expected=totals.expected)
        self._phase = _Phase.UPDATING
        with self.forward.ledger.span("compute", "optimizer"), torch.no_grad():
            try:
                self._commit.apply(result, clipped, answer.untouched)
            except TrainingError:  # nothing was applied
                self._phase = _Phase.BETWEEN
                raise
            trained.algorithm.end(step)
        self._phase, self.unreported = _Phase.SHARING, result
        return result

    def _share(self) -> None:
        with torch.no_grad():
            self._commit.share()
        self._phase = _Phase.BETWEEN

    def reported(self) -> None:
        """Takes in that the caller gets the result of the last step."""
        self.unreported = None

    def abandon(self) -> int | None:
        """Puts back what the forwards of a step that was cut short have changed. Returns by how many updates what this
        rank owns is then ahead of the step that was last begun: 1 where only weights were still to be brought together.
        None where its update was cut short: the state is that of no step."""
        if self._phase is _Phase.OPEN:
            self._effects.restore()
            self._phase = _Phase.BETWEEN
        return {_Phase.BETWEEN: 0, _Phase.SHARING: 1}.get(self._phase)

    def follow(self) -> None:
        """Goes on with the chunks that the algorithm has now."""
        self._reduce.follow()
        self.forward.intact.follow()
        if self._trained.buddy is not None:
            self._trained.buddy.follow()

    def pulled_by(self, pull: Callable[[Chunk], None] | None) -> None:
        """Has steps add to the mean gradient, before it is clipped (see Clip); None: they add nothing any more."""
        self._clip.pull = pull

    def settle(self) -> None:
        """Raises what a step left unread on the device."""
        if (read := self._commit.settle()) is not None:
            self._expect(read)

    def flush(self) -> None:
        """Makes updates that are due: none, where each step makes its own."""

    def close(self) -> None:
        """Ends: no step will come any more."""

    @property
    def keeps_back(self) -> bool:
        """Whether gradients of other steps are added to a step's (see Algorithm)."""
        return self._trained.algorithm.keeps_back

    @property
    def rounds(self) -> Sequence[Round]:
        """The rounds of the last step in which chunks were exchanged."""
        return self._reduce.rounds

    @property
    def arrivals(self) -> list[str]:
        """The parameters in the order in which the last step's backward completed their gradients on this rank."""
        return self._reduce.arrivals

    def _holds(self, step: int) -> Holds:
        return self._trained.algorithm.holds(step)

    def _expect(self, result: StepResult) -> None:
        """Takes the counts of a sample from a step of `_samples` samples, if they count anything."""
        if self._samples and result.count:
            self.per_sample = max(1e-6, result.count / self._samples)

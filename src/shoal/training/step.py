"""One step: the microbatches of a global batch, then reduce -> ballot -> clip -> vote -> apply.

The loss gives (sum, count), so a step's numbers do not depend on how its samples were split: the objective is the sum of all sums
over the sum of all counts. Before backward each sum is divided by a power of two near the expected count, so that low precision
does not overflow; the exact factor comes with the clip coefficient in one multiplication. The power of two cancels exactly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.chunks import Passing, sum_of_squares, value_of
from shoal.comm import Group
from shoal.data import Batch
from shoal.errors import ArgumentError, TrainingError, UserError
from shoal.exchange import Algorithm, Holds
from shoal.exchange.hooks import UserHooks
from shoal.exchange.reducer import Reducer
from shoal.exchange.rows import ByRows, as_rows
from shoal.models.moe import Router
from shoal.module.batchnorm import RunningStatistics, has_batch_statistics
from shoal.module.buffers import OtherBuffers, buffers_untouched
from shoal.module.compiling import branching
from shoal.module.random import Randomness, keyed_functional
from shoal.optim.optimizer import ChunkOptimizer
from shoal.parallel.context import Context
from shoal.parallel.expert import Tally
from shoal.parallel.layout import Layout
from shoal.pipeline import Runner as Pipeline
from shoal.precision import LossScale
from shoal.training.loss import Loss, Sums, call_loss
from shoal.training.norms import ClipRule, clip_by, norms_by_name
from shoal.training.result import StepResult
from shoal.training.stages import train_in_stages


def microbatches(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """The fixed cut of a global batch: `size` samples each, the last one shorter. It never depends on the number of ranks."""
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def share(number: int, rank: int, size: int) -> range:
    """Which of `number` microbatches `rank` runs: a contiguous run, the first ranks one more where it does not divide."""
    each, more = divmod(number, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def even(ids: Sequence[int], ranks: int) -> list[Sequence[int]]:
    """The shares of `ranks` ranks, as even as can be, empty where there are fewer samples than ranks."""
    parts = [share(len(ids), rank, ranks) for rank in range(ranks)]
    return [ids[part.start : part.stop] for part in parts]


class Share(NamedTuple):
    """What a rank has of a global batch: its `microbatches`; how many its partners have that come `after` it, and the `most` that one has; `samples` of all of them."""

    microbatches: list[Sequence[int]]
    after: int
    most: int
    samples: int


def with_idle(mine: Sequence[Sequence[int]], number: int, stand_in: Sequence[int]) -> list[tuple[Sequence[int], bool]]:
    """A rank's microbatches and whether each counts: filled up to `number` with `stand_in`, for the sake of what the forwards of all ranks do together."""
    return [(ids, True) for ids in mine] + [(stand_in, False)] * (number - len(mine))


def choose_microbatch(
    given: int | None, global_batch: int, ranks: int, module: nn.Module, sync_bn: bool, part: Callable[[int], int] = int
) -> int:
    """Samples a forward: as `given`, else `part` of a rank's whole share. UserError where that would change what the model computes."""
    if global_batch < 1:
        raise ArgumentError("global_batch", f" = {global_batch}: a step needs at least one sample")
    if given is not None and not 1 <= given <= global_batch:
        raise ArgumentError("microbatch", f" = {given}: give 1 to global_batch ({global_batch}) samples")
    whole = -(-global_batch // ranks)
    if (sync_bn or given is None) and (what := _routed_by_microbatch(module)) is not None:
        raise ArgumentError(
            "microbatch",
            f": the model's experts have {what}, which is of one microbatch: give one, the same under every plan, and no sync_bn",
        )
    if sync_bn:
        if given not in (None, whole):
            raise ArgumentError(
                "microbatch",
                f" = {given} with sync_bn: statistics over the global batch need each rank's {whole} samples in one microbatch",
            )
        return whole
    if given is None and has_batch_statistics(module):
        raise ArgumentError(
            "microbatch",
            " is not given, and the model has BatchNorm, whose result depends on which samples share one: give it, or switch on sync_bn "
            "for statistics over the global batch",
        )
    return given or part(whole)


def no_fixed_cut(given: int | None, sync_bn: bool) -> str:
    """Why the microbatches of a step are other ones under another number of ranks, if they are; `given`: the engine's microbatch."""
    if sync_bn:
        return "sync_bn makes each rank's share one microbatch"
    return "microbatch=None cuts each rank's share: give microbatch=" if given is None else ""


def _routed_by_microbatch(module: nn.Module) -> str | None:
    """What of a model's experts depends on which samples share a microbatch."""
    routers = [part.cfg for part in module.modules() if isinstance(part, Router)]
    if any(cfg.capacity_factor is not None for cfg in routers):
        return "a capacity"
    config = getattr(module, "config", None)
    if any(cfg.losses for cfg in routers) or (
        getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0)
    ):
        return "a balance loss"
    return None


class StepRunner:
    """Runs steps on this rank's share of each global batch. `even`: the shares are as even as can be, each one microbatch, and not
    runs of microbatches of a fixed size. `whole`: also a rank without samples runs one, as SyncBN needs. `beside`: the ranks among whom a
    model is cut, which all run the same microbatches. `context`: the ranks that share each microbatch's tokens; they are neighbours in the algorithm's group. `tally`:
    counts of tokens by expert. `alike`: whether all ranks run as many forwards, since they meet in them. `shares_routing`: whether balance losses are of all tokens
    of a microbatch that ranks share. `stages`: runs those of the model that this rank has, where it has not all; `across`: the ranks of its pipeline. `by_rows`: embeddings
    whose gradients are added up by rows. `users`: hooks on the parameters; `buffers`: those that are
    not BatchNorm's; `keeps`: `gradients` of the last step are kept, of each chunk what is owned here, before clipping; `norms_every`: so many steps have norms by name, 0: none."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: ChunkOptimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        parameters: Mapping[str, nn.Parameter],
        algorithm: Algorithm,
        randomness: Randomness,
        group: Group,
        *,
        microbatch: int,
        whole: bool,
        even: bool,
        clip: float | ClipRule | None,
        keeps: bool,
        norms_every: int,
        layouts: Mapping[str, Layout],
        device: torch.device,
        keyed: bool,
        users: UserHooks,
        buffers: OtherBuffers,
        passing: Passing | None = None,
        scale: LossScale | None = None,
        beside: Group | None = None,
        context: Context | None = None,
        tally: Tally | None = None,
        alike: bool = False,
        shares_routing: bool = False,
        stages: Pipeline | None = None,
        across: Group | None = None,
        by_rows: Sequence[ByRows] = (),
    ) -> None:
        self._stages, self._across, self._by_rows = stages, across, by_rows
        self._module, self._loss, self._passing, self._scale = module, loss, passing, scale
        self._context, self._streams = context, 1 if context is None else context.size
        self._tally, self._alike, self._shares_routing = tally, alike, shares_routing
        self._experts: Sequence[Tensor] = ()
        self._beside = beside if beside is not None and beside.size > 1 else None
        self._optimizer, self._scheduler, self._randomness = optimizer, scheduler, randomness
        self._parameters, self._algorithm = parameters, algorithm
        self._users = users
        self._reducer = Reducer(parameters, algorithm, self._users)
        self._group, self._ledger = group, group.ledger
        self._microbatch, self._whole, self._even, self._clip, self._device, self._keyed = microbatch, whole, even, clip, device, keyed
        self._partners, self._keeps, self._layouts = algorithm.partners, keeps, layouts
        self.gradients: list[Tensor] = []
        self._norms_every, self._norms = norms_every, dict[str, float]()
        self._statistics, self._buffers = RunningStatistics(module), buffers
        self._aux_names: tuple[str, ...] | None = None
        self.per_sample = 1.0  # counts seen a sample, the expectation for the next step: saved, so that a resumed run has the same bits
        self._samples = 0
        self._agreed = False
        self._unread: StepResult | None = None

    def follow(self) -> None:
        """Goes on with the chunks that the algorithm has now."""
        self._reducer.detach()
        self._reducer = Reducer(self._parameters, self._algorithm, self._users)

    @property
    def whole(self) -> bool:
        """Whether ranks meet in their forwards, for statistics of the whole batch."""
        return self._whole

    @property
    def keeps_back(self) -> bool:
        """Whether gradients of other steps are added to a step's (see Algorithm)."""
        return self._algorithm.keeps_back

    @property
    def arrivals(self) -> list[str]:
        """The parameters in the order in which the last step's backward completed their gradients on this rank."""
        return self._reducer.arrivals

    def cut(self, ids: Sequence[int]) -> Share:
        """This rank's share of a global batch."""
        ranks = self._group.size // self._streams
        if self._even:
            shares = [microbatches(part, self._microbatch) or [part] * self._whole for part in even(ids, ranks)]
        else:
            pieces = microbatches(ids, self._microbatch)
            shares = [[pieces[place] for place in share(len(pieces), rank, ranks)] for rank in range(ranks)]
        first, last = (self._group.ranks.index(self._partners.ranks[place]) // self._streams for place in (0, -1))
        mine, samples = self._group.rank // self._streams, sum(len(piece) for part in shares[first : last + 1] for piece in part)
        return Share(shares[mine], sum(map(len, shares[mine + 1 : last + 1])), len(shares[first]), samples)

    @contextmanager
    def rows(self) -> Iterator[None]:
        """Around microbatches: after it a forward is of whole rows again."""
        try:
            yield
        finally:
            if self._context is not None:
                self._context.close()

    def load(self, batch: Batch, ids: Sequence[int]) -> dict[str, Tensor]:
        """The samples `ids` on the device, of a row this rank's tokens; none of them as a batch of zero samples."""
        if not ids:
            return {key: value[:0].to(self._device) for key, value in batch.load(batch.ids[:1]).items()}
        return self.place(batch.load(ids))

    def place(self, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loaded samples on the device, of a row this rank's tokens."""
        microbatch = {key: value.to(self._device, non_blocking=True) for key, value in loaded.items()}
        return microbatch if self._context is None else self._context.cut(microbatch)

    def run(self, batch: Batch) -> StepResult:
        """One step on `batch`. Raises TrainingError, with the weights of the step before, on NaN."""
        started = time.perf_counter()
        mine, after, most, samples = self.cut(batch.ids)
        self.settle()
        if self._algorithm.holds(batch.step) is Holds.ALONE:
            samples = sum(len(ids) for ids in mine)
        self._samples = samples
        self.begin(batch.step, most, self.per_sample * samples)
        self._module.train()
        with nullcontext() if self._passing is None else self._passing.step(("train", most)), self.rows():
            self._accumulate(batch, with_idle(mine, most if self._alike else 0, batch.ids[: self._microbatch]))
        result = self.end(batch.epoch, after, samples / len(batch.ids))
        if self._unread is None:
            self._expect(result)
        result.seconds = time.perf_counter() - started
        return result

    def begin(self, step: int, most: int, expected: float) -> None:
        """Opens `step`, in which a rank has at most `most` microbatches; `expected`: about the count of all of them. Raises what the step
        before left unread on the device."""
        self.settle()
        self._ledger.step = self._step = step
        self._ran, self._expected = 0, self._near(expected)
        self._totals = torch.zeros(2 + len(self._aux_names or ()), dtype=torch.float64, device=self._device)
        self._algorithm.begin(step)
        if self._stages is not None:
            most *= self._stages.rounds
        self._reducer.begin(step, most, None if self._scale is None else self._scale.scale.reciprocal())
        self._statistics.begin()
        self._buffers.begin()
        if self._tally is not None:
            self._tally.begin()

    def _near(self, expected: float) -> float:
        """What sums are divided with before backward: a power of two near the expected count, or that count where gradients of other steps, in the unit of their mean, are added."""
        return max(1e-6, expected) if self.keeps_back else 2.0 ** round(math.log2(max(1.0, expected)))

    def _expect(self, result: StepResult) -> None:
        """Takes the counts of a sample from a step of `_samples` samples."""
        if self._samples:
            self.per_sample = max(1e-6, float(result._totals[1]) / self._samples)

    @contextmanager
    def keyed(self) -> Iterator[None]:
        """Around forward and backward: what is drawn there is keyed, if it is to be."""
        with branching(), keyed_functional(self._randomness) if self._keyed or self._context is not None else nullcontext():
            yield

    def backward(self, sums: Sums, last: bool, counts: bool = True) -> None:
        """Backward of one microbatch; in the step's `last` one what is complete is exchanged while it goes on. One that does not count
        gives zeros."""
        self._randomness.replay()
        self.ran(counts)
        objective = self.objective(sums if counts else sums.counting_nothing())
        with self._users.seeing(self._expected, sums.count, counts), self.reducing(last):
            objective.backward()

    def ran(self, counts: bool) -> None:
        """One more microbatch has run on this rank, which counts or does not."""
        self._ran += counts

    def objective(self, sums: Sums) -> Tensor:
        """What backward starts from; `sums` are added to the step's."""
        self._add(sums)
        objective = sums.total / self._expected
        for value in sums.aux.values():
            objective = objective + value * (sums.count / self._expected)
        return objective if self._scale is None else objective * self._scale.scale.to(objective.dtype)

    @contextmanager
    def reducing(self, last: bool, complete: Collection[str] | None = None) -> Iterator[None]:
        """Around a backward: what is complete is exchanged while it goes on (see Reducer.backward)."""
        # turns this rank's sums so far into their means; in the last microbatch those of the whole step
        known = self._ran and (self._stages is None or self._stages.is_last)
        count = self._totals[1]
        own_mean = torch.where(count > 0, self._expected / count, 0.0) if known else torch.ones_like(count)
        self._optimizer.settle()  # gradients are about to change
        with self._ledger.span("compute", "backward"), self._reducer.backward(own_mean, last, complete):
            yield
        if self._passing is not None:
            self._passing.backward_is_over()

    def end(self, epoch: int, after: int, share: float) -> StepResult:
        """Reduce, ballot, clip, vote, apply. `after`: how many microbatches the partners that come after this rank have; `share`: see StepResult."""
        step, holds = self._step, self._algorithm.holds(self._step)
        totals, squares, untouched = self._reduce(self._totals, self._ran, after, holds)
        norm, factor = self._clip_factor(step, totals[1], squares, self._expected, holds)
        lr = tuple(float(group["lr"]) for group in self._optimizer.torch.param_groups)
        scale = None if self._scale is None else self._scale.scale
        about = (totals, norm, self._aux_names or (), share, scale, self._experts)
        result = StepResult(step, epoch, lr, 0.0, *about, norms=self._norms)
        with self._ledger.span("compute", "optimizer"), torch.no_grad():
            self._vote_and_apply(result, factor, untouched, holds)
            self._algorithm.end(step)
        return result

    def _accumulate(self, batch: Batch, runs: Sequence[tuple[Sequence[int], bool]]) -> None:
        """Each microbatch, whether it counts or not."""
        if self._stages is not None:
            train_in_stages(self, self._stages, batch, runs, self._randomness, self._group if self._alike else None)
            return
        for index, (ids, counts) in enumerate(runs):
            with self._ledger.span("compute", "load"):
                microbatch = self.load(batch, ids)
            self._randomness.begin(batch.step, ids)
            with self.counted(counts), self.running(batch, index, len(runs), microbatch):
                self.backward(self.forward(microbatch), index == len(runs) - 1, counts)

    @contextmanager
    def running(self, batch: Batch, index: int, number: int, microbatch: Mapping[str, Tensor]) -> Iterator[None]:
        """Around forward and backward, or forward, of one microbatch of `number`."""
        try:
            with self.keyed():
                yield
        except Exception as error:
            shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in microbatch.items())
            error.add_note(f"in step {batch.step}, microbatch {index + 1} of {number} on this rank: {shapes}")
            raise

    def forward(self, microbatch: Mapping[str, Tensor]) -> Sums:
        """The loss of a microbatch."""
        with self._ledger.span("compute", "forward"), as_rows(self._by_rows), self.watching() as gave:
            sums = call_loss(self._loss, self._module, microbatch)
            gave((sums.total, sums.count, sums.aux))
        if self._context is not None:
            self._context.attended()
            if not self._of_all_tokens(sums.aux):
                raise UserError(
                    f"plan.cp = {self._streams} with the auxiliary losses {tuple(sums.aux)}: they are means over all tokens of a microbatch, of which "
                    "each rank has a part"
                )
        return sums

    def watching(self) -> AbstractContextManager[Callable[[Any], None]]:
        """Around a forward, which tells what it gives: what becomes of the model's buffers."""
        return self._buffers.watching()

    def aside(self) -> AbstractContextManager[None]:
        """Around forwards that are for shapes alone."""
        return nullcontext() if self._passing is None else self._passing.aside()

    def left(self) -> None:
        """A stage's forward is over, where the model's would go on."""
        if self._passing is not None:
            self._passing.left()

    @contextmanager
    def counted(self, counts: bool) -> Iterator[None]:
        """Around a microbatch: of one that does not count nothing is left."""
        with ExitStack() as stack:
            if not counts:
                stack.enter_context(buffers_untouched(self._module))
                stack.enter_context(self._buffers.mute())
                if self._tally is not None:
                    stack.enter_context(self._tally.mute())
            yield

    def _of_all_tokens(self, aux: Mapping[str, Tensor]) -> bool:
        """Whether these auxiliary losses are those of routers, which see all tokens of a microbatch wherever they are."""
        return not aux or (self._shares_routing and aux.keys() <= {"router", "router_z"})

    def _add(self, sums: Sums) -> None:
        """Adds to this rank's totals: (sum, count, auxiliary numerators ...), fp64."""
        names = tuple(sums.aux)
        if self._aux_names is None:
            self._aux_names = names
            self._totals = torch.cat([self._totals, self._totals.new_zeros(len(names))])
        elif names != self._aux_names:
            raise UserError(
                f"loss returned the auxiliary losses {names}, before it was {self._aux_names}: return the same each time"
            )
        row = [sums.total.detach(), sums.count, *(value.detach() * sums.count for value in sums.aux.values())]
        self._totals = self._totals + torch.stack([item.double() for item in row])

    def _reduce(self, totals: Tensor, run_here: int, after: int, holds: Holds) -> tuple[Tensor, Tensor, list[str]]:
        """The exchange ends, then one ballot carries the sums, the squared norms of the ranks' cuts, which parameters were touched,
        whether buffers changed, and running statistics. Returns (totals, squared norm of the group's sum, untouched parameters).

        That every rank came to the ballot is the vote that all of them got through the step. Replicas that train alone have none.
        """
        touched = list(self._reducer.touched.values())
        self._reducer.finish()
        squares = torch.stack([sum_of_squares([], self._device), *self._reducer.squares]).sum(0)
        experts = [] if self._tally is None else [self._tally.row()]
        if not self._agreed:
            totals = self._agree_on_names(totals)
        if self._partners.size == 1 or holds is Holds.ALONE:
            untouched = [name for name, seen in self._reducer.touched.items() if not seen]
            return self._of_all_stages(totals, *experts), self._norm_squared(squares), self._untouched_on_all_stages(untouched)
        flags = torch.tensor([*touched, bool(self._users.reshaped), *self._buffers.flags(run_here)], dtype=torch.float64)
        flags = flags.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else flags
        parts = [totals, squares, flags, *experts]
        if len(self._statistics) and not self._whole:
            parts.append(self._statistics.term(run_here, after))
        ballot = self._partners.all_reduce(torch.cat(parts), purpose="ballot")
        totals, squares, flags, *statistics = ballot.split([len(part) for part in parts])
        experts = [statistics.pop(0) for _ in experts]
        if statistics:
            self._statistics.commit(statistics[0])
        if self._users.hooked and flags[-3] > 0:
            raise self._users.refusal()
        if len(self._buffers) and flags[-2] > 0:
            if flags[-1] > 0:
                self._buffers.agree(self._partners.all_gather_object(self._buffers.rules), self._partners.size, self._streams)
            self._buffers.merge(self._partners, run_here, after, self._streams == 1)
        untouched = []
        if not all(touched):
            untouched = [name for name, ranks in zip(self._reducer.touched, flags.tolist(), strict=False) if ranks == 0]
        return self._of_all_stages(totals, *experts), self._norm_squared(squares), self._untouched_on_all_stages(untouched)

    def _untouched_on_all_stages(self, untouched: list[str]) -> list[str]:
        """Of the parameters that this rank's replicas have not touched those that no stage has which shares them: all that have one update it alike."""
        shared = [] if self._stages is None else sorted(self._stages.tied)
        if self._across is None or not shared:
            return untouched
        touched = [name in self._reducer.touched and name not in untouched for name in shared]
        flags = self._across.all_reduce(torch.tensor(touched, dtype=torch.int32, device=self._device), "max", purpose="ballot")
        elsewhere = {name for name, flag in zip(shared, flags.tolist(), strict=True) if flag}
        return [name for name in untouched if name not in elsewhere]

    def _of_all_stages(self, totals: Tensor, *counts: Tensor) -> Tensor:
        """`totals`, which the last stage alone has seen. `counts`: a row of the tally, to which each stage adds its own layers."""
        if self._across is not None:
            told = self._across.all_reduce(torch.cat([totals, *counts]), purpose="ballot")
            totals, *counts = told.split([len(totals), *map(len, counts)])
        if self._tally is not None:
            self._experts = self._tally.read(*counts)
        return totals

    def _agree_on_names(self, totals: Tensor) -> Tensor:
        """At the first step: a rank without a microbatch, or without the loss, learns the names of the auxiliary losses from the others, and what forwards do to buffers."""
        self._agreed = True
        names, rules, everywhere = self._aux_names, [self._buffers.rules], [self._buffers.rules]
        for group in (self._partners, self._across):
            if group is not None and group.size > 1:
                told = group.all_gather_object((names, everywhere))
                names = next((each for each, _ in told if each is not None), None)
                everywhere = [each for _, theirs in told for each in theirs]
                rules = everywhere if group is self._partners else rules
        alone = self._algorithm.holds(self._step) is Holds.ALONE
        self._buffers.agree(rules, 1 if alone else self._partners.size, self._streams, everywhere)
        names = names or ()
        if self._aux_names is None:
            self._aux_names = names
            totals = torch.cat([totals, totals.new_zeros(len(names))])
        return totals

    def _clip_factor(self, step: int, count: Tensor, squares: Tensor, expected: float, holds: Holds) -> tuple[Tensor, Tensor]:
        """The gradient's norm, and what the gradient chunks are multiplied with: exact mean and clipping."""
        to_mean = torch.where(count > 0, expected / count, 0.0)
        if holds is Holds.OWN:
            to_mean = to_mean * self._partners.size  # the replicas' means, weighted by their counts, average to the group's
        self._algorithm.exchanged(step, to_mean)
        self._to_mean = to_mean
        if holds in (Holds.MEAN, Holds.OWN_MEAN, Holds.LATE, Holds.NOTHING):
            to_mean = torch.ones_like(to_mean)
        if holds is Holds.SUM:
            norm = squares.sqrt() * to_mean
        else:
            norm = self._squares_here().sqrt() * to_mean
        chunks = self._algorithm.replica.chunks
        if self._keeps:
            self.gradients = [chunk.owned.gradient * to_mean.to(chunk.owned.gradient.device) for chunk in chunks]
        factor, due = to_mean, self._norms_every > 0 and (step + 1) % self._norms_every == 0
        asked = self._clip if callable(self._clip) and math.isfinite(norm) else None
        self._norms = {}
        if due or asked is not None:
            self._norms = norms_by_name(chunks, self._layouts, float(to_mean), self._partners, self._beside, self._across)
        if asked is not None:
            factor = to_mean * clip_by(asked, self._norms, chunks)
        elif self._clip is not None and not callable(self._clip):
            factor = to_mean * (self._clip / (norm + 1e-6)).clamp(max=1.0)
        if holds in (Holds.OWN, Holds.OWN_MEAN) and self._partners.size > 1:
            # all vote alike, for the update is one that they make together
            mean = (self._partners.all_reduce(norm.square(), purpose="norm") / self._partners.size).sqrt()
            norm = mean if holds is Holds.OWN_MEAN else torch.where(torch.isfinite(mean), norm, mean)
        return norm, factor

    def _squares_here(self) -> Tensor:
        """The sum of squares of all gradients that the chunks hold now; of chunks that are cut, or apart, each owner adds its part."""
        chunks = self._algorithm.replica.chunks
        apart = [chunk for chunk in chunks if chunk.is_cut or chunk.apart]
        sharers = [self._algorithm.partners_of(chunk) for chunk in apart]
        parts = [
            piece for chunk, group in zip(apart, sharers, strict=True) for piece in chunk.norm_pieces(group.rank, group.size)
        ]
        everywhere = [piece for chunk in chunks if not (chunk.is_cut or chunk.apart) for piece in chunk.norm_pieces()]
        whole, cut = (sum_of_squares(pieces, self._device) for pieces in (everywhere, parts))
        if apart:
            cut = self._partners.all_reduce(cut, purpose="norm")
        return self._norm_squared(whole + cut)

    def _norm_squared(self, squares: Tensor) -> Tensor:
        """Of the gradient of the whole model, from the exact sum over what is here of it."""
        for group in (self._beside, self._across):
            if group is not None:
                squares = group.all_reduce(squares, purpose="norm")
        return value_of(squares)

    def _of_all_owners(self, names: list[str]) -> list[str]:
        """Where chunks or the model are cut, also the names that their other owners have found; in the order of the module, stage by stage."""
        if any(chunk.is_cut or chunk.apart for chunk in self._algorithm.replica.chunks):
            names = [name for theirs in self._partners.all_gather_object(names) for name in theirs]
        if self._beside is not None:
            names = [name for theirs in self._beside.all_gather_object(names) for name in theirs]
        found = set(names)
        names = [name for name in self._parameters if name in found]
        stages = [names] if self._across is None else self._across.all_gather_object(names)
        return list(dict.fromkeys(name for each in stages for name in each))

    def _vote_and_apply(self, result: StepResult, factor: Tensor, untouched: Sequence[str], holds: Holds) -> None:
        """Applies the update if loss and norm are finite: where replicas are to stay equal they are the same bits on every rank, so all
        vote alike."""
        self._optimizer.rows, self._optimizer.turn = self._reducer.rows, result.step

        late, untouched = holds is Holds.LATE, self._algorithm.due(result.step, untouched)

        def update(skip: Tensor | None) -> None:
            self._algorithm.update(result.step, factor, skip, untouched)
            self._algorithm.renew(self._to_mean, skip, untouched)
            count = result._totals[1]
            self._algorithm.counted(count if skip is None else count * (1 - skip))

        if holds is Holds.NOTHING:
            self._require_finite(result)
            return  # the schedule counts updates
        if self._device.type == "cuda" and self._algorithm.skips_on_device(result.step):
            skip = ~torch.isfinite(result._norm) if late else result._overflow() | (result._totals[1] == 0)
            update(skip.float())
            if self._tally is not None:
                self._tally.balance(skip)
            self._unread = result
        elif result.tokens == 0 and not (late and math.isfinite(result.grad_norm)):
            pass  # every label is ignored: there is no mean, and nothing to learn from
        elif not result.skipped:
            self._require_finite(result)
            update(None)
            if self._tally is not None:
                self._tally.balance()
        if self._scale is not None:
            self._scale.update(result._overflow())
            if self._unread is None:
                self._require_finite(result)
        if self._scheduler is not None:
            self._scheduler.step()

    def flush(self) -> None:
        """Makes updates that are due: none, where each step makes its own."""

    def close(self) -> None:
        """No step will come any more."""

    def settle(self) -> None:
        """Raises what a step left unread on the device."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._require_finite(unread)
            self._expect(unread)

    def _require_finite(self, result: StepResult) -> None:
        if result.tokens == 0 or (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            return
        if self._scale is not None and not bool(self._scale.stuck):
            return  # skipped
        self._statistics.restore()
        what = (
            f"the loss is {result.loss}"
            if not math.isfinite(result.loss)
            else f"the gradient norm is {result.grad_norm} (the loss is {result.loss:.6g})"
        )
        # In the order in which gradients come: the first is nearest to the cause.
        broken = self._of_all_owners([name for name in self._optimizer.known if not self._optimizer.grad(name).isfinite().all()])
        weights = self._of_all_owners([name for name, value in self._optimizer.masters().items() if not value.isfinite().all()])
        broken.reverse()
        where = (
            f"first parameter with a gradient that is not finite: {broken[0]} ({len(broken)} of {sum(map(len, self._optimizer.members))})"
            if broken
            else "gradients are finite"
        )
        if weights:
            where += f"; weights already not finite: {weights[0]}"
        if result.loss_scale is not None:
            where += f"; it overflows at every loss scale down to {result.loss_scale:g}"
        raise TrainingError(
            f"step {result.step}: {what}; {where}. The update was not applied. A lower learning rate, a longer warm-up, clipping, or "
            "the data of this step are the usual places to look"
        )

"""How the samples of a global batch, or of an evaluation, become the microbatches of each rank.

There is one cut of the batch into microbatches of a fixed size, which never depends on the number of ranks, and each
rank runs a contiguous run of them: as many as the others, or in the ratio of `plan.shares`. Where no size is given
samples are dealt out so, and each share is cut by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from shoal.comm import Group
from shoal.data.cursor import in_shares, share_starts
from shoal.errors import ArgumentError
from shoal.models.moe import Router
from shoal.module.batchnorm import has_batch_statistics
from shoal.pipeline import samples_to_fill
from shoal.plan import Plan

Run = tuple[Sequence[int], bool]
"""A microbatch's samples, and whether it counts."""


def microbatches(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """Cuts `ids` into microbatches of `size` samples, the last one shorter."""
    return [ids[start : start + size] for start in range(0, len(ids), size)]


class Share(NamedTuple):
    """A rank's part of a global batch.

    `microbatches`: the samples of each. `after`: number of microbatches on the partners behind this rank. `most`: the
    largest number of microbatches that a partner has. `alike`: whether all partners run so many. `samples`: of all
    partners together.
    """

    microbatches: list[Sequence[int]]
    after: int
    most: int
    alike: bool
    samples: int


@dataclass(frozen=True)
class Dealing:
    """Deals samples to `ranks` ranks, of which this is the one numbered `rank`.

    - `size`: samples of a microbatch
    - `even`: each rank's share is cut by itself, and not whole microbatches of one cut of the batch
    - `all_run`: a rank without samples runs a microbatch of none, as SyncBN needs
    - `partners`: the ranks that update together, side by side
    - `lockstep`: all ranks run as many microbatches, since they meet in their forwards
    - `shares`: of each rank, relative to each other
    """

    size: int
    even: bool
    all_run: bool
    rank: int
    ranks: int
    partners: range
    lockstep: bool = False
    shares: tuple[float, ...] = ()

    @property
    def place(self) -> tuple[int, int, tuple[float, ...]]:
        """The number of ranks, the number of this one, and their shares."""
        return self.ranks, self.rank, self.shares

    def cut(self, ids: Sequence[int]) -> Share:
        """Gives this rank its share of the batch `ids`."""
        rank, first, last = self.rank, self.partners[0], self.partners[-1] + 1
        shares, least = self.shares or (1,) * self.ranks, int(self.even and self.all_run)
        starts, numbers = _dealt(len(ids), 1 if self.even else self.size, self.size, shares, least)
        mine = microbatches(ids[starts[rank] : starts[rank + 1]], self.size)
        if not mine and least:
            mine = [ids[:0]]
        theirs = numbers[first:last]
        alike = self.lockstep or len(set(theirs)) == 1
        return Share(mine, sum(numbers[rank + 1 : last]), max(theirs), alike, starts[last] - starts[first])


@lru_cache(maxsize=64)
def _dealt(
    samples: int, unit: int, size: int, shares: tuple[float, ...], least: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Deals `samples` out in pieces of `unit`. Returns the first sample of each rank, and their number at the end, and
    the number of microbatches of each, at least so many."""
    starts = tuple(min(samples, start * unit) for start in share_starts(-(-samples // unit), shares))
    return starts, tuple(max(-(-(end - start) // size), least) for start, end in pairwise(starts))


def partners_in(group: Group, partners: Group, streams: int = 1) -> range:
    """Numbers the `partners`, ranks of `group` side by side, among replicas of which `streams` ranks share each row."""
    first, last = (group.ranks.index(partners.ranks[end]) // streams for end in (0, -1))
    return range(first, last + 1)


def with_idle(mine: Sequence[Sequence[int]], number: int, stand_in: Sequence[int]) -> list[Run]:
    """Fills a rank's microbatches up to `number` with `stand_in`, which does not count: ranks meet in their
    forwards."""
    return [(ids, True) for ids in mine] + [(stand_in, False)] * (number - len(mine))


def largest_share(number: int, plan: Plan) -> int:
    """The most of `number` samples, or microbatches, that a rank of `plan` has."""
    return max(in_shares(number, tuple(plan.shares) or (1,) * plan.sample_ranks))


def choose_microbatch(given: int | None, global_batch: int, plan: Plan, module: nn.Module, sync_bn: bool) -> int:
    """Chooses the samples of a forward of `module`: as `given`, or a rank's share (see `usual_microbatch`).

    Raises UserError where that would change what the model computes.
    """
    check_microbatch(given, global_batch)
    check_routing(given, module, sync_bn)
    chosen = usual_microbatch(given, global_batch, plan, sync_bn)
    if sync_bn and given not in (None, chosen):
        raise ArgumentError(
            "microbatch",
            f" = {given} with sync_bn: statistics over the global batch need each rank's {chosen} samples in one "
            f"microbatch",
        )
    if given is None and not sync_bn and has_batch_statistics(module):
        raise ArgumentError(
            "microbatch",
            " is not given, and the model has BatchNorm, whose result depends on which samples share one: give it, or "
            "switch on sync_bn for statistics over the global batch",
        )
    return chosen


def usual_microbatch(given: int | None, global_batch: int, plan: Plan, sync_bn: bool) -> int:
    """Returns the samples of a forward: as `given`, else a rank's share of the batch, of which stages run several; with
    `sync_bn` all of it, whatever the stages."""
    share = largest_share(global_batch, plan)
    return share if sync_bn else given or samples_to_fill(plan, share)


def check_microbatch(given: int | None, global_batch: int) -> None:
    """Raises ArgumentError for a number of samples that no step has."""
    if global_batch < 1:
        raise ArgumentError("global_batch", f" = {global_batch}: a step needs at least one sample")
    if given is not None and not 1 <= given <= global_batch:
        raise ArgumentError("microbatch", f" = {given}: give 1 to global_batch ({global_batch}) samples")


def check_routing(given: int | None, module: nn.Module, sync_bn: bool = False) -> None:
    """Raises UserError where which samples share a microbatch decides what experts compute, and that is not `given`."""
    if (sync_bn or given is None) and (what := _routed_by_microbatch(module)) is not None:
        raise ArgumentError(
            "microbatch",
            f": the model's experts have {what}, which is of one microbatch: give one, the same under every plan, and "
            f"no sync_bn",
        )


def no_fixed_cut(given: int | None, sync_bn: bool) -> str:
    """Says why the microbatches of a step depend on the number of ranks, if they do; `given`: the engine's
    microbatch."""
    if sync_bn:
        return "sync_bn makes each rank's share one microbatch"
    return "microbatch=None cuts each rank's share: give microbatch=" if given is None else ""


def _routed_by_microbatch(module: nn.Module) -> str | None:
    """Names what of a model's experts depends on which samples share a microbatch."""
    routers = [part.cfg for part in module.modules() if isinstance(part, Router)]
    if any(cfg.capacity_factor is not None for cfg in routers):
        return "a capacity"
    config = getattr(module, "config", None)
    if any(cfg.losses for cfg in routers) or (
        getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0)
    ):
        return "a balance loss"
    return None

"""The loss over a dataset: every rank takes its share of the microbatches, and all get the same mean."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shoal.comm import Group
from shoal.data.loader import Collate, stacked
from shoal.device import keep_generators
from shoal.errors import UserError
from shoal.module.buffer_values import buffers_put_back
from shoal.training.forward import Forward
from shoal.training.local import Local
from shoal.training.loss import Loss, Sums
from shoal.training.microbatches import Dealing, with_idle
from shoal.training.stages import Staged

log = logging.getLogger(__name__)

TELL = 1.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `tokens` counts of the whole dataset (or its first batches), the same on every rank.

    `also`: the means of the other measures that were asked for.
    """

    loss: float
    tokens: int
    seconds: float
    also: tuple[float, ...] = ()


@dataclass(frozen=True)
class HeldOut:
    """The first `samples` of a map-style dataset."""

    dataset: Any
    samples: int
    collate: Collate | None = None

    def load(self, ids: Sequence[int]) -> Mapping[str, Tensor]:
        """Stacks the samples `ids`."""
        return stacked([self.dataset[i] for i in ids], self.collate)


@torch.no_grad()
def evaluate(
    forward: Forward,
    dealing: Dealing,
    data: HeldOut,
    group: Group,
    accumulate: Local | Staged,
    measures: Sequence[Loss] = (),
    progress: Callable[[int, int], object] | None = None,
) -> Evaluation:
    """Gives the mean loss of the module in evaluation mode, and leaves its buffers as they are; all ranks of `group`,
    the replicas, call it.

    What forwards draw is by the samples' places in the dataset, keyed or not as in a step, and the same each time.
    `accumulate`: runs microbatches, as in a step. `measures`: taken in the same pass, each returns (sum, count) as the
    loss. `progress`: is told, again and again, how many of this rank's microbatches are done, of how many.

    Raises UserError if nothing there counts.
    """
    started = time.perf_counter()
    device = forward.randomness.device
    measured = _Measured(forward, (forward.loss, *measures), accumulate.runs_once)
    whole = replace(dealing, all_run=False, partners=range(dealing.ranks))
    share, stand_in = whole.cut(range(data.samples)), range(min(data.samples, dealing.size))
    runs = with_idle(share.microbatches, share.most if dealing.lockstep else 0, stand_in)
    told = started

    def tell(done: int) -> None:
        nonlocal told
        if progress is not None:
            progress(done, len(runs))
        if time.perf_counter() - told >= TELL:
            told = time.perf_counter()
            log.info("evaluating: %d of %d microbatches", done, len(runs))

    forward.switch(train=False)
    try:
        with (
            keep_generators([device]),
            buffers_put_back(forward.module),
            forward.intact.aside(),
            forward.gather.step(("evaluate", len(runs))),
            forward.rows(),
        ):
            for done in accumulate.evaluate(runs, data.load, measured.measure, measured.add):
                tell(done)
    finally:
        forward.module.train()
    totals = group.all_reduce(measured.totals, purpose="evaluation")
    for axis in forward.axes:
        (totals,) = axis.add_sums([totals], "evaluation")
    sums, counted = totals.tolist()[::2], totals.tolist()[1::2]
    if 0 in counted:
        raise UserError("the evaluation set has nothing to count: every label is ignored, or it is empty")
    mean, *also = (total / count for total, count in zip(sums, counted, strict=True))
    return Evaluation(mean, round(counted[0]), time.perf_counter() - started, tuple(also))


class _Measured:
    """Sums of one loss after the other over microbatches. `totals`: (sum, count) of each, fp64 [2 * losses].

    `runs_once`: the module can run once a microbatch only.
    """

    def __init__(self, forward: Forward, losses: Sequence[Loss], runs_once: bool) -> None:
        self._forward, self._losses, self._runs_once = forward, losses, runs_once
        self.totals = torch.zeros(2 * len(losses), dtype=torch.float64, device=forward.randomness.device)

    def measure(self, loaded: Mapping[str, Tensor], ids: Sequence[int]) -> list[Sums]:
        """Takes all of one microbatch, whose samples are `ids`; each sees it as it was loaded."""
        forward, several = self._forward, len(self._losses) > 1
        microbatch = forward.place(loaded)
        module: Any = _Once(forward.module, self._runs_once) if several else forward.module
        before = {key: value.clone() for key, value in microbatch.items()} if several else {}
        found = []
        for loss in self._losses:
            versions = _versions(microbatch)
            forward.randomness.begin("evaluation", ids)
            with forward.keyed():
                found.append(replace(forward, module=module, loss=loss).sums(dict(microbatch)))
            if versions != _versions(microbatch):
                for key, value in before.items():
                    microbatch[key].copy_(value)
        return found

    def add(self, found: Sequence[Sums], counts: bool) -> None:
        """Adds what was measured of a microbatch, if that counts."""
        row = [value.double() for sums in found for value in (sums.total, sums.count)]
        self.totals += torch.stack(row) * counts


class _Once:
    """A module that several measures call on one microbatch: called again with the same tensors it gives the same
    output.

    It runs again where a measure has written to that output; with `copies` it runs once, and each gets a copy.
    """

    def __init__(self, module: nn.Module, copies: bool) -> None:
        self._module, self._copies = module, copies
        self._given: tuple[Any, ...] | None = None
        self._output: Any = None
        self._versions: list[int] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs, *kwargs.values())
        same = self._given is not None and len(given) == len(self._given) and all(map(_is, given, self._given))
        if not same or self._versions != _versions(self._output):
            self._given, self._output = given, self._module(*args, **kwargs)
            self._versions = _versions(self._output)
        return tree_map_only(Tensor, Tensor.clone, self._output) if self._copies else self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _is(one: Any, other: Any) -> bool:
    return one is other


def _versions(output: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]

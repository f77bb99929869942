"""The loss over a dataset: every rank takes its share of the microbatches, and all get the same mean."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.chunks import Passing
from shoal.comm import Group
from shoal.data.loader import Collate, stack_samples
from shoal.errors import UserError
from shoal.module.random import Randomness, keyed_functional
from shoal.parallel.context import Context
from shoal.pipeline import Runner
from shoal.training.loss import Loss, Sums, call_loss
from shoal.training.stages import evaluate_in_stages
from shoal.training.step import microbatches, share, with_idle

log = logging.getLogger(__name__)

TELL = 1.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `tokens` counts of the whole dataset (or its first batches), the same on every rank."""

    loss: float
    tokens: int
    seconds: float


@torch.no_grad()
def evaluate(
    module: nn.Module,
    loss: Loss,
    dataset: Any,
    samples: int,
    microbatch: int,
    collate: Collate | None,
    group: Group,
    device: torch.device,
    randomness: Randomness,
    keyed: bool,
    passing: Passing | None = None,
    context: Context | None = None,
    alike: bool = False,
    pipeline: Runner | None = None,
    even: bool = False,
) -> Evaluation:
    """The mean loss of `module` in evaluation mode over the first `samples` of a map-style dataset; all ranks of `group` call it. What forwards draw is by the
    samples' places in it, `keyed` or not as in a step, and the same each time. With `context` its ranks share the tokens of each row, and attention is what
    `randomness` says. `alike`: every rank runs as many forwards, since they meet in them. `pipeline`: runs the stages that this rank has. `even`: ranks have as
    even shares as can be, and not whole microbatches of one cut.

    Raises UserError if nothing there counts.
    """
    started = time.perf_counter()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    stack = collate or stack_samples
    streams = 1 if context is None else context.size
    ranks = group.size // streams
    dealt = [share(samples, place, ranks) for place in (group.rank // streams, 0)]
    if not even:  # whole microbatches of the one cut that there is
        whole = [share(-(-samples // microbatch), place, ranks) for place in (group.rank // streams, 0)]
        dealt = [range(part.start * microbatch, min(part.stop * microbatch, samples)) for part in whole]
    own, first = (microbatches(part, microbatch) for part in dealt)
    mine = with_idle(own, len(first) if alike else 0, first[0] if first else ())

    told = started

    def tell(done: int) -> None:
        nonlocal told
        if time.perf_counter() - told >= TELL:
            told = time.perf_counter()
            log.info("evaluating: %d of %d microbatches", done, len(mine))

    def forward(loaded: Mapping[str, Tensor], ids: Sequence[int]) -> Sums:
        batch = {key: value.to(device) for key, value in loaded.items()}
        randomness.begin("evaluation", ids)
        with keyed_functional(randomness) if keyed or context is not None else nullcontext():
            sums = call_loss(loss, module, batch if context is None else context.cut(batch))
        if context is not None:
            context.attended()
        return sums

    devices = [device.index] if device.type == "cuda" else []
    module.eval()
    try:
        with torch.random.fork_rng(devices), nullcontext() if passing is None else passing.step(("evaluate", len(mine))):
            for done, (ids, does_count) in enumerate([] if pipeline is not None else mine):
                tell(done)
                sums = forward(stack([dataset[i] for i in ids]), ids)
                totals += torch.stack([sums.total.double(), sums.count.double()]) * does_count
            if pipeline is not None:
                at_once = 8 * pipeline.group.size  # loaded
                for start in range(0, len(mine), at_once):
                    tell(start)
                    some = mine[start : start + at_once]
                    loaded = [(stack([dataset[i] for i in ids]), ids) for ids, _ in some]
                    counts = [each for _, each in some]
                    aside, left = (nullcontext, _nothing) if passing is None else (passing.aside, passing.left)
                    evaluate_in_stages(pipeline, loaded, counts, forward, totals, group if alike else None, aside, left)
    finally:
        if context is not None:
            context.close()
        module.train()
    totals = group.all_reduce(totals, purpose="evaluation")
    if pipeline is not None:
        totals = pipeline.group.all_reduce(totals, purpose="evaluation")
    total, count = totals.tolist()
    if count == 0:
        raise UserError("the evaluation set has nothing to count: every label is ignored, or it is empty")
    return Evaluation(total / count, round(count), time.perf_counter() - started)


def _nothing() -> None:
    pass

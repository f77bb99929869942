"""What a run says of this machine: of each kind of work how many times longer it takes than is counted, and what
collectives reach. What is not plausible is left as it was."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from shoal.device import any_device, is_accelerator
from shoal.errors import in_section
from shoal.jobs.choose import Settled
from shoal.planner.cluster import Cluster
from shoal.planner.kept import threads_of
from shoal.planner.learned import LEAST, MOST, Learned, is_plausible, learn, learned, reaches_of
from shoal.planner.task import Estimate
from shoal.precision import precision
from shoal.report.changes import TermsRecord
from shoal.report.metrics import RunRecord

FEWEST = 3
"""Sampled steps that are needed at least to learn from."""


def spent_on(sampled: Sequence[TermsRecord], what: str) -> float:
    """Median seconds of a term."""
    return median(each.terms.get(what, 0.0) for each in sampled)


def learn_from(
    run_dir: Path,
    settled: Settled,
    run: RunRecord,
    cluster: Cluster,
    estimate: Estimate,
    sampled: Sequence[TermsRecord],
) -> str:
    """Keeps what a run of this machine says for later predictions of as many ranks; says what, or why nothing."""
    device, on_host, ranks = any_device(), cluster.per_host, cluster.size
    if len(sampled) < FEWEST:
        return f"nothing learned: of {len(sampled)} steps is known what they were spent on, {FEWEST} are needed"
    if run.versions.get("torch") not in (None, torch.__version__):
        return f"nothing learned: the run was of torch {run.versions['torch']}, this is {torch.__version__}"
    if not is_accelerator(device) and run.threads not in (None, threads_of(device, on_host)):
        return (
            f"nothing learned: the run's ranks had {run.threads} threads each, a plan is made for "
            f"{threads_of(device, on_host)}"
        )
    with in_section("train"):
        dtype = precision(settled.job.train.precision).model
    before = learned(device, dtype, ranks, on_host, sampled[-1].hosts) or Learned(
        1.0, 1.0, 1.0, 0.0, 0.0, (), (), "", 0.0
    )
    left = list[str]()

    def times(what: str, predicted: float, known: float, beside: float = 0.0) -> float:
        """How many times longer `what` took than is counted of the measured rates, without the seconds `beside`."""
        took = spent_on(sampled, what)
        if not predicted or not took:
            return known
        if is_plausible(found := max(0.0, took - beside) / predicted * known):
            return found
        left.append(f"{what} took {found:.3g} times what was measured, not {LEAST:g} to {MOST:g} times")
        return known

    on_host_only = settled.job.plan.memory is not None  # the host updates, at a rate of its own
    calls = [each.calls for each in sampled]
    seconds = median(each.seconds for each in sampled)
    other, most = spent_on(sampled, "other"), estimate.microbatches * estimate.choice.microbatch
    if other > seconds / 2:
        left.append(f"{other / seconds:.0%} of a step are in no term")
    forward = times("forward", estimate.forward, before.forward)
    # what backward computes again takes as many times longer as forward does
    again = max(0.0, estimate.terms["compute"] - estimate.forward - estimate.backward) * forward / before.forward
    found = Learned(
        forward,
        times("backward", estimate.backward, before.backward, again),
        before.update if on_host_only else times("optimizer", estimate.terms["optimizer"], before.update),
        before.other if other > seconds / 2 else max(0.0, other - estimate.terms["other"] + cluster.step),
        spent_on(sampled, "data") / min(most, settled.job.train.global_batch),
        reaches_of(calls, False, cluster.hosts[0].inside) or before.inside,
        reaches_of(calls, True, cluster.between) or before.across,
        str(run_dir.resolve()),
        time.time(),
    )
    learn(device, dtype, ranks, on_host, sampled[-1].hosts, found)
    also = f"; left as it was: {'; '.join(left)}" if left else ""
    return f"kept for the next prediction: {found}{also}"

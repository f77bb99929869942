"""Which layers of the planner's answer stay whole along tp: where cutting them takes more time than it saves."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import UserError
from shoal.jobs.answer import Chosen, confirmed, profile_of, shallow_of, subject_of
from shoal.jobs.choose import Settled
from shoal.plan import Plan
from shoal.planner.costs import Prices
from shoal.planner.degrees import ways
from shoal.planner.layers import Layers, layers_of
from shoal.planner.placements import Rates
from shoal.planner.task import Estimate, Task


def placed(settled: Settled, task: Task) -> Chosen:
    """Returns the answer, confirmed, with what was found of its layers; where some are better left whole, it is
    searched again with these, and the faster answer taken."""
    chosen = confirmed(settled, task)
    pins, task = dict(task.pins), replace(task, compiled=chosen.task.compiled, selective=chosen.task.selective)
    given = pins.get("placements")
    layers = layers_under(settled, task, chosen.estimate, given)
    if layers is None or not layers.whole:
        return replace(chosen, layers=layers)
    placements = {**layers.whole, **(given or {})}
    try:
        pins["placements"] = placements
        traced = profile_of(settled, ways(pins, task.cluster.size), Plan(placements=placements))
        other = confirmed(settled, replace(task, profile=traced, pins=pins))
    except UserError:  # it takes more memory, or cannot be cut so
        return replace(chosen, layers=layers)
    faster = other.estimate.choice.spread.parts > 1 and other.estimate.seconds < chosen.estimate.seconds
    return replace(other if faster else chosen, layers=layers, eager=chosen.eager)


def layers_under(settled: Settled, task: Task, estimate: Estimate, placements: dict[str, str] | None) -> Layers | None:
    """What cutting the layers saves under a choice, of a model of few blocks where that says all; None without tp, and
    for a model whose operations cannot be listed."""
    choice, cluster = estimate.choice, task.cluster
    ranks = choice.spread.parts
    if ranks == 1:
        return None
    link = cluster.link(choice.spread.stride("parts"), ranks)
    numbers = task.numbers
    rates = Rates.of(ranks, link, Prices(task).slowest, numbers.dtype, estimate.microbatches, numbers.rounded)
    plan = Plan(placements=placements)
    shallow = shallow_of(settled, plan)
    subject = subject_of(settled, plan=plan) if shallow is None else shallow[0]
    try:
        return layers_of(replace(subject, microbatch=choice.microbatch), rates, placements)
    except UserError:
        return None

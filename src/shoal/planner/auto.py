"""`shoal.auto_plan`: the fastest plan for a model that is no job file's, on the ranks that there are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.assembly.arguments import check_arguments
from shoal.assembly.recipe import Recipe
from shoal.comm import Reaches, World
from shoal.comm.first import from_first
from shoal.data import stack_samples
from shoal.errors import ArgumentError, UserError
from shoal.launch import join
from shoal.module.batchnorm import has_batch_statistics
from shoal.module.build import without_values
from shoal.module.compiling import fuses
from shoal.optim.groups import GroupRule, OptimizerFactory, small_optimizer
from shoal.pipeline import schedule_of
from shoal.plan import Plan
from shoal.planner.ask import check_tokens, legal_degrees, numbers_of
from shoal.planner.cluster import Cluster
from shoal.planner.cluster_file import cluster_of
from shoal.planner.compiled import keeps_inside, why_not_compiled
from shoal.planner.confirm import confirm
from shoal.planner.degrees import ways
from shoal.planner.dry_run import dry_run, dry_run_stages
from shoal.planner.machines import BETWEEN, MACHINES
from shoal.planner.measure import groups_of, here
from shoal.planner.pins import check_machine, check_pins, check_traced
from shoal.planner.positions import tokens_of
from shoal.planner.predict import Machine, lacking_most, predict
from shoal.planner.prepare import Subject, Untraced
from shoal.planner.probe import probe, run_together
from shoal.planner.profile import profile
from shoal.planner.recording import Recording
from shoal.planner.replicable import as_replicable
from shoal.planner.search import search
from shoal.planner.task import Estimate, Task
from shoal.planner.untraced import check_divided, without_trace
from shoal.precision import precision as precision_named
from shoal.toml import plan_text
from shoal.training.loss import Loss
from shoal.training.microbatches import check_microbatch, check_routing, largest_share

LOG = logging.getLogger(__name__)
_NOTHING = dict.fromkeys(("schedule", "collate", "tensor_rules", "clip", "clip_value"))
_USUAL = {"sync_bn": False, "keep_gradients": False, "seed": 0, "norms_every": 0, "dropout": "keyed"}
_OTHERS: Mapping[str, Any] = {**_NOTHING, **_USUAL}
"""The arguments of Engine that a plan does not depend on, as they are by default."""


def auto_plan(
    model: Callable[[], nn.Module],
    loss: Loss,
    optimizer: OptimizerFactory,
    sample: Mapping[str, Any],
    *,
    global_batch: int,
    microbatch: int | None = None,
    precision: str | Mapping[str, Any] = "fp32",
    pins: Mapping[str, Any] | None = None,
    param_groups: GroupRule | None = None,
    buffers: str = "exact",
    world: World | None = None,
    cluster: Cluster | str | None = None,
) -> tuple[Plan, int]:
    """Returns the fastest plan for `Engine`, and its microbatch. A collective call: rank 0 asks, and tells the others.

    model: a factory, as for Engine; it may be any module, of transformers, timm or one's own.
    sample: one row of the data, as the dataset gives it: a dict of tensors, arrays or numbers.
    microbatch: rows of a forward, if they are given; they must be for a model with statistics over a batch.
    pins: fields of the plan that are given, e.g. {"tp": 2}.
    buffers: as for Engine: where several replicas cannot keep them as one process would, there is one, unless
        "averaged".
    cluster: another machine, as `shoal plan --on` is given it: "8xh100", "h100x64" or the path of a cluster file; by
        default this machine, measured, with what groups of the ranks reach.

    A model that cannot be traced, as values decide what it computes, is data parallel over all ranks; rank 0 logs a
    warning of what could not be traced. Raises UserError, on all ranks alike, where nothing is legal or fits, or where
    `pins` ask for what only a trace could tell; it says what is missing.
    """
    row, world, numbers = _row_of(locals()), world or join(), precision_named(precision)
    subject = Subject(model, loss, row, 1, numbers, Plan(), param_groups)
    groups = groups_of(world) if cluster is None else None
    ran = run_together(world, subject, global_batch, microbatch) if cluster is None else ()
    given, length = pins or {}, tokens_of(row) or None

    def find() -> tuple[dict[str, Any], int]:
        check_pins(given)
        machine = _machine(cluster, world, numbers.model, groups)
        check_machine(given, machine.size)
        values = _settings(model, microbatch)
        check_tokens(given, values, length, machine.size)
        try:
            traced = profile(replace(subject, plan=Plan(placements=given.get("placements"))), ways(given, machine.size))
        except Untraced as error:
            check_divided(given, subject)
            plan, why = without_trace(given, machine.size, error)
            LOG.warning("plan: %s (%s)", plan_text(plan.to_dict()), why)
            return plan.to_dict(), microbatch or largest_share(global_batch, plan)
        check_traced(given, traced)
        legal = legal_degrees(values, traced, length, machine.per_host)
        asked = Task(traced, machine, global_batch, numbers_of(numbers, optimizer), microbatch, None, given, legal)
        cores = any(device.on_host for device in machine.devices)
        asked = _with_compiled(asked, subject, not cores and (cluster is not None or fuses(world.device)))
        asked = probe(subject, replace(asked, optimizer=partial(small_optimizer, optimizer, [{}])), together=ran)
        plan, rows = as_replicable(asked, buffers, partial(_confirmed, subject=subject, optimizer=optimizer))
        return plan.to_dict(), rows

    table, rows = from_first(world.everyone, find, "auto_plan: ")
    return Plan.from_dict(table), rows


def _machine(given: Cluster | str | None, world: World, dtype: torch.dtype, groups: Reaches | None) -> Cluster:
    """The machine that is given or named, or that of these ranks, with what their `groups` reach."""
    if given is None:
        return here(world.size, world.per_host, dtype, world.device, groups, sharing=world.on_host)
    return cluster_of(given, MACHINES, BETWEEN, "cluster =") if isinstance(given, str) else given


def _row_of(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The row of the data among the arguments of `auto_plan`, as an engine would have it. Raises UserError for those
    that an engine would refuse, in its words."""
    engine = {**_OTHERS, **given, "plan": None}
    check_arguments(engine)
    Recipe.taken_from(engine)
    check_microbatch(given["microbatch"], given["global_batch"])
    if isinstance(given["model"], nn.Module):
        remedy = "give a function that makes one, such as lambda: Model(config)"
        raise ArgumentError("model", f" is a ready module, and a plan is found by making it anew: {remedy}")
    if not isinstance(given["cluster"], Cluster | str | None):
        raise ArgumentError("cluster", f' = {given["cluster"]!r:.100}: give a machine by name, such as "8xh100"')
    if not isinstance(given["pins"], Mapping | None):
        raise ArgumentError("pins", f' = {given["pins"]!r:.100}: give a table of fields of a plan, such as {{"tp": 2}}')
    return {key: each[0] for key, each in stack_samples([given["sample"]]).items()}


def _with_compiled(asked: Task, subject: Subject, pays: bool) -> Task:
    """What is `asked`, with what compiled blocks of the model of `subject` can do. `pays`: whether compiling may."""
    compiled = pays and not why_not_compiled(subject)
    selective = not (compiled or asked.pins.get("compile")) or keeps_inside(subject, asked.pins)
    return replace(asked, compiled=compiled, selective=selective)


def _settings(model: Callable[[], nn.Module], microbatch: int | None) -> dict[str, Any]:
    """What the model's own configuration says of it, where it has one. Raises UserError where no microbatch is given,
    and it has statistics over a batch or experts that go by it."""
    made = without_values(model)
    if made is None:  # the trace says more
        return {}
    check_routing(microbatch, made)
    if microbatch is None and has_batch_statistics(made):
        raise UserError(
            "the model has statistics over a batch, so what it computes depends on the microbatch: give microbatch"
        )
    config: Any = getattr(made, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return config.to_dict() if hasattr(config, "to_dict") else {}


def _confirmed(task: Task, subject: Subject, optimizer: OptimizerFactory) -> tuple[Plan, int]:
    """The fastest candidate whose ranks can be run dry and fit."""

    def look(task: Task, estimate: Estimate) -> tuple[Plan, str]:
        plan = estimate.choice.plan(task.pins)
        return plan, _why_not(task, subject, optimizer, plan, estimate)

    chosen = confirm(task, search(task), look)
    return chosen.looked, chosen.estimate.choice.microbatch


def _why_not(task: Task, subject: Subject, optimizer: OptimizerFactory, plan: Plan, estimate: Estimate) -> str:
    """Why a plan does not go, by dry runs of some ranks along its pipeline (`Estimate.places`); "" if it does. Raises
    UserError for one that the engine refuses."""
    cluster = task.cluster
    on_host = cluster.hosts[0].device.on_host
    ranks = min(cluster.per_host, plan.size)
    memory = min(host.memory for host in cluster.hosts)
    machine = Machine(memory, None if on_host else cluster.memory, ranks, cluster.is_here)
    own = replace(subject, microbatch=estimate.choice.microbatch, plan=plan)
    recorded = _recorded(own, estimate.places)
    asked = optimizer, plan, subject.precision, machine, estimate.microbatches
    return lacking_most((predict(each, *asked) for each in recorded), task.usable)


def _recorded(subject: Subject, places: Iterable[int]) -> list[Recording]:
    """Dry runs of the ranks at `places` of a pipeline; without stages of one."""
    if not subject.plan.pipelined:
        return [dry_run(subject)]
    staged, one = dry_run_stages(subject), schedule_of(subject.plan, 1)
    return [staged.of(one.stages_of(place)) for place in places]

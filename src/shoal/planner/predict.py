"""A plan's memory before it runs, whether it fits a machine, and which other plans would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch

from shoal import units
from shoal.assembly.compatibility import (
    Asked,
    check_conflicts,
    check_exchange,
    check_gradients_by_name,
    check_no_flush,
    check_recompute,
)
from shoal.chunks import Budget, budget, search
from shoal.chunks.search import Choice
from shoal.chunks.tier import AUTO_SHARE
from shoal.errors import UserError
from shoal.exchange import Algorithm
from shoal.exchange.algorithm import USUAL_CHUNK
from shoal.exchange.hooks import no_sum
from shoal.exchange.tuning import given_chunk_bytes
from shoal.optim.buddy import steps_between
from shoal.optim.groups import OptimizerFactory, small_optimizer, state_keys
from shoal.optim.tiers.disk import room_for_pages
from shoal.optim.tiers.pager import in_turn
from shoal.pipeline import schedule_of
from shoal.plan import Plan, option_name
from shoal.planner.layout import Laid, Place, chosen_chunk, lay_out_all, passes
from shoal.planner.memory import may_stream, memory_need
from shoal.planner.need import MemoryNeed
from shoal.planner.recording import Recording
from shoal.planner.state import optimizer_state
from shoal.precision import Precision
from shoal.training.vote import check_verify

BUDGET, GPU, HOST, DISK = "plan.memory.device", "GPU memory", "host memory", "plan.memory.disk"
AT_HOME = "plan.memory.host"


@dataclass(frozen=True)
class Machine:
    """Bytes that are free: of each GPU (`device`, None where there is none: then all is in the host's memory), and of
    each host for its `ranks`. `is_here`: whether it is this machine, of whose disks one can look what is free."""

    host: int
    device: int | None = None
    ranks: int = 1
    is_here: bool = True


@dataclass(frozen=True)
class Fit:
    """What is needed of one memory of the machine, and what there is."""

    memory: str
    needed: int
    available: int

    @property
    def free(self) -> int:
        """Bytes left; below 0 it does not fit."""
        return self.available - self.needed


@dataclass(frozen=True)
class Prediction:
    """What a rank of `plan` needs, with chunks of about `chunk_bytes` of gradient. `smallest`: the
    `plan.memory.device` that would do. `sizes`: the search for that, where weights pass."""

    plan: Plan
    need: MemoryNeed
    smallest: int | None
    chunks: tuple[Laid, ...]
    chunk_bytes: int
    sizes: Choice | None
    fits: tuple[Fit, ...]

    @property
    def free(self) -> int:
        """Bytes left of the memory that is shortest."""
        return min(fit.free for fit in self.fits)

    def lacking(self, most: float) -> str:
        """Says what is too much, where a rank needs more than `most` bytes of its device, or than `plan.memory` gives
        it of a tier, or ranks more than their host has; else "". Without a GPU the device is a part of the host's
        memory, and no other microbatch helps a budget: it holds weights and gradients alone."""
        fits, nbytes = {fit.memory: fit for fit in self.fits}, self.need.total("device")
        if BUDGET in fits and fits[BUDGET].free < 0:
            least, given = units.enough(fits[BUDGET].needed), units.size(fits[BUDGET].available)
            if GPU in fits:
                return f"a dry run counts {least}, more than {BUDGET} = {given}"
            return f"{BUDGET} = {given} is too little: take {least} at least"
        for tier, needed, allowed in self._at_home():
            if needed > allowed:
                return f"{tier} = {units.size(allowed)} is too little: take {units.enough(needed)} at least"
        if DISK in fits and fits[DISK].free < 0:
            least, there = units.enough(fits[DISK].needed), units.size(fits[DISK].available)
            return (
                f"{DISK}: {there} are free for a rank, and it takes {least}: free as much there, or name another disk"
            )
        if GPU not in fits:
            nbytes += self.need.total("host")
        elif fits[HOST].free < 0:
            return f"a dry run counts {units.enough(fits[HOST].needed)} of a host"
        return f"a dry run counts {units.enough(nbytes)}" if nbytes > most else ""

    def _at_home(self) -> Iterator[tuple[str, int, int]]:
        """What is needed of host and disk, and what the plan gives of them."""
        yield from ((fit.memory, fit.needed, fit.available) for fit in self.fits if fit.memory == AT_HOME)
        allowed = budget(self.plan.memory, torch.device("cpu"))
        if allowed is not None and allowed.disk is not None and allowed.disk.size is not None:
            yield DISK, self.need.total("disk"), allowed.disk.size


def lacking_most(predictions: Iterable[Prediction], most: float) -> str:
    """What `lacking` says of the rank that is shortest of memory: what it is told to take does for the others, too. ""
    where all fit."""
    shortest = sorted(predictions, key=lambda each: each.free)
    return next(filter(None, (each.lacking(most) for each in shortest)), "")


@dataclass(frozen=True)
class Asks:
    """What is asked of training that not every plan gives: statistics of the global batch, gradients by name, with what
    asks for these ("norms_every"; None for nothing), and votes of replicas on what they hold."""

    sync_bn: bool = False
    by_name: str | None = None
    verifies: bool = False


NOTHING = Asks()


def _checked(
    plan: Plan, optimizer: OptimizerFactory, precision: Precision, recording: Recording, asks: Asks
) -> Algorithm:
    """Returns the exchange. Raises UserError for what an engine refuses of a plan beside what trains under it."""
    options, flushes = recording.options, not plan.pipelined or schedule_of(plan, 1).flushes
    check_conflicts(Asked(plan, optimizer, precision, options, asks.sync_bn))
    check_recompute(plan)
    statistics, biases = recording.agrees.statistics, recording.agrees.biases
    if not flushes:
        check_no_flush(plan, precision, statistics, asks.sync_bn, biases, recording.ties)
    small = partial(small_optimizer, optimizer, options)
    exchange = check_exchange(plan, precision.keep, make=small, moves_biases=biases)
    check_gradients_by_name(plan, asks.by_name, exchange, flushes)
    if asks.verifies:
        check_verify(plan, exchange, flushes)
    return exchange


def predict(
    recording: Recording,
    optimizer: OptimizerFactory,
    plan: Plan,
    precision: Precision,
    machine: Machine,
    microbatches: int,
    process: int = 0,
    asks: Asks = NOTHING,
) -> Prediction:
    """Predicts the memory of the first rank. Raises UserError, as the engine would, for what does not go together."""
    exchange = _checked(plan, optimizer, precision, recording, asks)
    limit, chunk = _limits(plan, machine)
    together = plan.copy_size if plan.zero else 1
    with_experts = max(1, together // plan.ep)
    place = Place(
        0, together, machine.ranks, machine.ranks == plan.stage_size, machine.device is not None, limit, with_experts
    )
    state = optimizer_state(optimizer, recording.options, precision, together > 1 or plan.memory is not None)
    parameters, given = recording.parameters, given_chunk_bytes(exchange, chunk)
    alone = plan.size == 1 and microbatches == 1 and plan.memory is not None
    low = all(key.dtype == torch.bfloat16 and not key.sparse for _, _, key in parameters if key.trainable)
    if alone and state.in_one_pass and low and not may_stream(plan, precision, place.on_gpu):
        precision = replace(precision, grad=torch.bfloat16)  # gradients go home as they are
    turns = 0
    if may_stream(plan, precision, place.on_gpu):
        turns = in_turn(state_keys(optimizer, recording.options, precision.master), precision.master)
    whole = state.whole_parameters
    asked = replace(plan, buddy=steps_between(plan.buddy, optimizer, recording.options, precision))

    def chosen(budget: int | None) -> int:
        within = replace(place, budget=budget)
        return chosen_chunk(parameters, plan, within, precision, whole, given, USUAL_CHUNK, turns)

    @cache
    def needed(size: int) -> tuple[list[Laid], MemoryNeed]:
        chunks = lay_out_all(parameters, plan, place, precision, whole, size)
        return chunks, memory_need(recording, chunks, asked, place, precision, state, microbatches, process)

    size = chosen(limit)
    chunks, need = needed(size)
    borrowed = {slot.name for each in chunks if each.borrows for slot in each.slots} if microbatches > 1 else set()
    if name := next(filter(borrowed.__contains__, recording.summed), None):
        raise no_sum(name, microbatches)
    sizes = None
    if passes(plan, place):
        sizes = search(parameters, place.together, precision.grad.itemsize, whole, limit, turns)
    smallest = _smallest(lambda budget: _least(needed(chosen(budget))[1], place.on_gpu), limit)
    fits = tuple(_fits(need, plan, machine, smallest, limit, recording.activations))
    return Prediction(plan, need, smallest, tuple(chunks), size, sizes, fits)


def _least(need: MemoryNeed, on_gpu: bool) -> int | None:
    """The bytes of the tier of `plan.memory.device` that chunks of one size would do with, None without such a tier."""
    return need.smallest() if on_gpu and need.least is not None else need.least  # its allocator knows of all


def _smallest(least: Callable[[int | None], int | None], limit: int | None) -> int | None:
    """The `plan.memory.device` that would do, None without such a tier. `least(budget)`: what chunks would do with that
    are of the size that the engine chooses under a budget. Under the one that they ask for it may choose larger ones,
    so that is asked again, until a budget is enough for its own."""
    first = found = least(limit)
    while found is not None and (own := least(found)) is not None and own > found:
        found = own
    return found if first is None or found is None or limit is None or first > limit else min(found, limit)


def _limits(plan: Plan, machine: Machine) -> tuple[int | None, int | None]:
    """What `plan.memory` says of the device's bytes, and of a chunk's, on that machine."""
    if plan.memory == "auto":
        return None if machine.device is None else int(AUTO_SHARE * machine.device), None
    allowed = budget(plan.memory, torch.device("cpu"))
    return (None, None) if allowed is None else (allowed.device, allowed.chunk)


def _fits(
    need: MemoryNeed, plan: Plan, machine: Machine, smallest: int | None, limit: int | None, one: int
) -> Iterator[Fit]:
    """`one`: bytes of the activations of a microbatch."""
    if limit is not None and smallest is not None:
        yield Fit(BUDGET, smallest, limit)
    allowed = budget(plan.memory, torch.device("cpu"))
    if allowed is not None and allowed.host is not None:
        yield Fit(AT_HOME, _at_home(need, allowed, one), allowed.host)
    if allowed is not None and allowed.disk is not None:
        given = [] if allowed.disk.size is None else [allowed.disk.size]
        free = [room_for_pages(allowed.disk.path) // machine.ranks] if machine.is_here else []
        if given or free:
            yield Fit(DISK, need.total("disk"), min([*given, *free]))
    if machine.device is not None:
        yield Fit(GPU, need.total("device"), machine.device)
        yield Fit(HOST, need.total("host", machine.ranks), machine.host)
    else:
        yield Fit(HOST, need.total("device", machine.ranks) + need.total("host", machine.ranks), machine.host)


def _at_home(need: MemoryNeed, allowed: Budget, one: int) -> int:
    """Bytes that `plan.memory.host` has to be. Of activations the first microbatch goes there as a whole."""
    own = [row for row in need.rows if row.tier == "host" and row.role != "process"]
    home = sum(row.nbytes for row in own if row.phase == "always" or row.role == "activations")
    return home + (round((1 - allowed.activations) * one) if allowed.activations else 0)


def others(plan: Plan) -> list[Plan]:
    """Plans of the same ranks that need less of some memory: those with fewest changes first, and recompute before
    zero before memory."""
    recompute = [plan.recompute, *(["full"] if option_name(plan.recompute, "recompute") != "full" else [])]
    stages = range(plan.zero, 4 if plan.sample_ranks > 1 else plan.zero + 1)
    memory = [plan.memory, *([{}] if plan.memory != {} else [])]
    found = [
        replace(plan, recompute=again, zero=stage, memory=kept)
        for kept, stage, again in product(memory, stages, recompute)
    ]
    return sorted(found, key=lambda other: len(changes(plan, other)))[1:]


def changes(plan: Plan, other: Plan) -> dict[str, Any]:
    """The fields of `other` that differ from `plan`."""
    return {
        each.name: value for each in fields(plan) if (value := getattr(other, each.name)) != getattr(plan, each.name)
    }


def that_fit(plans: list[Plan], predicted: Callable[[Plan], Prediction], most: int = 3) -> list[Prediction]:
    """The first of `plans` that fit, at most so many; where none does, the one that lacks least. Those that are
    refused are passed over."""
    found: list[Prediction] = []
    best: list[Prediction] = []
    for plan in plans:
        try:
            prediction = predicted(plan)
        except UserError:
            continue
        if prediction.free >= 0:
            found.append(prediction)
            if len(found) == most:
                break
        best = [max([*best, prediction], key=lambda each: each.free)]
    return found or best

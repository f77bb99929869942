"""What a rank needs of memory, by role and tier: a pure function of the model's recording, the plan, the precision and
the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.chunks import Budget, budget
from shoal.chunks.gradient_pool import BUFFERS
from shoal.chunks.make import ALIKE, EXPERTS, TIED_ALIKE
from shoal.optim.buddy import FOR_BUDDY
from shoal.optim.tiers.disk import sectors
from shoal.optim.tiers.pager import BUFFERS as PAGES
from shoal.optim.tiers.placement import IN_TURN, number_away
from shoal.pipeline import delay, kept, schedule_of, steady
from shoal.plan import Plan
from shoal.planner.layout import Laid, Place, passes
from shoal.planner.need import MemoryNeed, Phase, Row
from shoal.planner.recording import Recording
from shoal.planner.replay import Replayed, replay
from shoal.planner.state import State
from shoal.precision import Precision

KEPT = {"split": 2, "kahan": 2, "stochastic": 0}
"""Bytes that a master takes between updates (see chunks.masters)."""


def memory_need(
    recording: Recording,
    chunks: Sequence[Laid],
    plan: Plan,
    place: Place,
    precision: Precision,
    state: State,
    microbatches: int,
    process: int = 0,
) -> MemoryNeed:
    """Adds up what the rank at `place` needs, which runs `microbatches` a step of the recorded kind. `plan.buddy` is a
    number here (see steps_between). `process`: bytes of an interpreter with torch.

    Not counted are what an exchange keeps of its own (error feedback, averages), codes on their way, and what kernels
    allocate inside.
    """
    at_a_time = _streamed(chunks, precision, state, plan, place)
    allowed = budget(plan.memory, torch.device("cpu")) or Budget()
    alike = plan.sample_ranks == 1 or plan.ep > 1 or passes(plan, place)  # else the last batch of a pass may be uneven
    order, grad = _backwards(recording, plan, microbatches), precision.grad.itemsize
    moved = replay(recording, chunks, order, grad, place.on_gpu, allowed.activations, alike)
    home = "device" if plan.memory is None else "host"
    away = _away(chunks, precision, state, allowed) if allowed.disk is not None else []
    kept = _for_backward(recording, plan, microbatches)
    on_host = round(allowed.activations * kept)
    rows = [
        *_kept(chunks, precision, state, home, place, away),
        *_unflushed(recording, chunks, plan, precision),
        *_in_turn(chunks, precision, state, away),
        Row(IN_TURN, "device", at_a_time, "backward"),
        Row("buffers", "device", recording.buffers),
        *_on_loan(chunks, plan, place, precision, moved),
        *_in_use(plan, place, moved),
        Row("activations", "device", kept - on_host, "backward"),
        Row("activations", "host", on_host, "backward"),
    ]
    if plan.memory is None or place.on_gpu:
        rows.append(Row("temporaries", "device", recording.temporaries, "backward"))
    else:  # such a tier counts what a plan moves or keeps, and the rest is host memory like any other
        rows.append(Row("temporaries", "host", recording.temporaries, "backward"))
    rows += _for_buddy(chunks, plan, place, precision, state)
    rows.append(Row("process", "host", process))
    found = tuple(row for row in rows if row.nbytes)
    if plan.memory is None:
        return MemoryNeed(found, None)
    others = kept - recording.activations  # of other microbatches, which a replay does not see
    beside = round((1 - allowed.activations) * others) + at_a_time
    unlimited = moved.all_used + moved.others + beside if place.budget is None else None
    return MemoryNeed(found, moved.least + beside, unlimited)


def _backwards(recording: Recording, plan: Plan, microbatches: int) -> list[int]:
    """The stage of each backward of a step, in order; 0 where there are none."""
    if not recording.stages:
        return [0] * microbatches
    own, schedule = dict(recording.stages), steady(plan, microbatches)
    return [stage for stage in schedule.backwards(schedule.rank_of(recording.stages[0][0])) if stage in own]


def _for_backward(recording: Recording, plan: Plan, microbatches: int) -> int:
    """The most bytes that wait for a backward at a time: in a pipeline those of all microbatches under way."""
    if not recording.stages:
        return recording.activations
    schedule, of_stage = steady(plan, microbatches), dict(recording.stages)
    order = schedule.orders[schedule.rank_of(recording.stages[0][0])]
    waiting = (sum(number * of_stage.get(stage, 0) for stage, number in now.items()) for now in kept(order))
    return max(recording.activations, *waiting)


def _unflushed(recording: Recording, chunks: Sequence[Laid], plan: Plan, precision: Precision) -> list[Row]:
    """What a schedule without a flush keeps beside: older versions of the weights, and the gradients of the step under
    way."""
    if not recording.stages or schedule_of(plan, 1).flushes:
        return []
    trained = [chunk for chunk in chunks if chunk.key.trainable]
    older = delay(plan, recording.stages[0][0]) * sum(chunk.nbytes for chunk in trained)
    gradients = sum(chunk.size for chunk in trained) * precision.grad.itemsize
    same = [
        chunk for chunk in trained if chunk.key.dtype == precision.master
    ]  # masters are apart from the weights all the same
    masters = sum(chunk.owned for chunk in same) * precision.master.itemsize
    found = [("older weights", older), ("gradients under way", gradients), ("masters", masters)]
    return [Row(role, "device", nbytes) for role, nbytes in found]


def _page(chunk: Laid, precision: Precision, state: State) -> dict[str, int]:
    """What of a chunk a page on the disk would hold, by role."""
    if not chunk.key.trainable:
        return {}
    wide = chunk.key.dtype.is_floating_point and precision.master != chunk.key.dtype and precision.keep == "whole"
    states = sum(state.nbytes(chunk.key.options, slot.shape) for slot in chunk.own)
    return {"masters": chunk.owned * precision.master.itemsize * wide, "optimizer state": states}


def _whole_page(chunk: Laid, precision: Precision, state: State) -> int:
    """Bytes of its file: with what the host has too, if masters do not say that."""
    page = _page(chunk, precision, state)
    beside = (
        [] if page.get("masters") else [chunk.owned * chunk.key.dtype.itemsize, chunk.owned * _rest(chunk, precision)]
    )
    return sum(sectors(nbytes) for nbytes in (sum(page.values()), *beside))


def _trained(chunks: Sequence[Laid]) -> list[Laid]:
    """Returns the chunks of which this rank updates something."""
    return [chunk for chunk in chunks if chunk.key.trainable and chunk.own]


def _largest_page(trained: Sequence[Laid], precision: Precision, state: State) -> int:
    return max((_whole_page(chunk, precision, state) for chunk in trained), default=0)


def _away(chunks: Sequence[Laid], precision: Precision, state: State, allowed: Budget) -> list[Laid]:
    """The chunks whose masters and state lie on the disk, as the engine chooses them."""
    trained = _trained(chunks)
    pages = [sum(_page(chunk, precision, state).values()) for chunk in trained]
    kept = sum(
        chunk.owned
        * (chunk.key.dtype.itemsize + (precision.grad.itemsize + _rest(chunk, precision)) * chunk.key.trainable)
        for chunk in chunks
    )
    largest, others = _largest_page(trained, precision, state), allowed.activations > 0
    return trained[: number_away(pages, largest, kept, allowed.host, others)]


def _rest(chunk: Laid, precision: Precision) -> int:
    """Bytes that the host keeps of an element's master beside the weight, on whatever tier the rest is."""
    return KEPT.get(precision.keep, 0) if precision.master != chunk.key.dtype else 0


def _in_turn(chunks: Sequence[Laid], precision: Precision, state: State, away: Sequence[Laid]) -> list[Row]:
    """Pages that are read, updated and written."""
    return [Row(IN_TURN, "host", _buffers(_trained(chunks), precision, state))] if away else []


def _buffers(trained: Sequence[Laid], precision: Precision, state: State) -> int:
    return min(PAGES, len(trained)) * _largest_page(trained, precision, state)


def _streamed(chunks: Sequence[Laid], precision: Precision, state: State, plan: Plan, place: Place) -> int:
    """Bytes of the device for pages in turn, where updates pass through it or, beside a GPU that will measure it,
    may."""
    trained = [chunk for chunk in _trained(chunks) if chunk.passes]
    wide = all(_page(chunk, precision, state)["masters"] for chunk in trained)
    return _buffers(trained, precision, state) if wide and may_stream(plan, precision, place.on_gpu) else 0


def may_stream(plan: Plan, precision: Precision, on_gpu: bool) -> bool:
    """Whether masters and optimizer state may pass through the device for their update: it is asked for, or left to a
    GPU's measurement."""
    allowed = budget(plan.memory, torch.device("cpu"))
    if allowed is None or not precision.low or not allowed.may_stream(precision.keep):
        return False
    return allowed.update == "streamed" or (allowed.update == "auto" and on_gpu)


def _kept(
    chunks: Sequence[Laid], precision: Precision, state: State, home: str, place: Place, away: Sequence[Laid]
) -> list[Row]:
    """What is there all the time, and the masters that an update opens. On the disk are two generations of pages,
    where all are there."""
    rows = []
    generations = 2 if len(away) == len(_trained(chunks)) else 1
    for chunk in chunks:
        at, itemsize = home if chunk.is_cut else "device", chunk.key.dtype.itemsize
        common = chunk.is_cut and place.one_memory and not place.on_gpu and not chunk.passes
        weights = chunk.owned if chunk.passes else chunk.size
        rows.append(Row("weights", at, weights * itemsize, sharers=place.sharers(chunk.key) if common else 1))
        if not chunk.key.trainable:
            continue
        gradient = chunk.owned if chunk.borrows else chunk.size
        rows.append(Row("gradients", at, gradient * precision.grad.itemsize))
        page = _page(chunk, precision, state)
        if chunk in away:
            rows += [Row(role, "disk", generations * nbytes) for role, nbytes in page.items()]
            if generations == 2:
                rows.append(Row("weights", "disk", 2 * (_whole_page(chunk, precision, state) - sum(page.values()))))
        else:
            rows.append(Row("optimizer state", at, page["optimizer state"]))
        if chunk.key.dtype.is_floating_point and precision.master != chunk.key.dtype:
            opened = chunk.owned * precision.master.itemsize
            rest = opened if precision.keep == "whole" else chunk.owned * KEPT[precision.keep]
            if chunk not in away or precision.keep != "whole":
                rows.append(Row("masters", at, rest))
            on_host = at == "host" or not place.on_gpu
            if precision.keep != "whole" and not (precision.keep == "split" and on_host and state.in_one_pass):
                rows.append(Row("masters opened", at, opened, "update"))
    return _summed(rows)


def _summed(rows: Sequence[Row]) -> list[Row]:
    """One row for all that differ in bytes only, in order of appearance."""
    sums: dict[tuple[str, str, Phase, int], int] = {}
    for row in rows:
        key = (row.role, row.tier, row.phase, row.sharers)
        sums[key] = sums.get(key, 0) + row.nbytes
    return [Row(role, tier, nbytes, phase, sharers) for (role, tier, phase, sharers), nbytes in sums.items()]


def _for_buddy(chunks: Sequence[Laid], plan: Plan, place: Place, precision: Precision, state: State) -> list[Row]:
    """What this rank keeps of another one: two snapshots, and the gradients of the steps between. That is as much as
    another rank keeps of this one, of what no third rank has."""
    found = 0
    for chunk in chunks if plan.buddy and plan.size > 1 else ():
        ranks = plan.replicas if chunk.key.group != EXPERTS else plan.replicas_of_experts
        parts = plan.stage_size // plan.replicas if chunk.key.group in (ALIKE, TIED_ALIKE) else 1
        if parts * ranks > (place.sharers(chunk.key) if chunk.is_cut and plan.zero else 1):
            continue
        if not chunk.key.trainable:
            found += chunk.owned * chunk.key.dtype.itemsize
            continue
        states = sum(state.nbytes(chunk.key.options, slot.shape) for slot in chunk.own)
        found += 2 * (chunk.owned * precision.master.itemsize + states)
        found += int(plan.buddy) * chunk.owned * precision.grad.itemsize
    return [Row(FOR_BUDDY, "host", found)]


def _on_loan(chunks: Sequence[Laid], plan: Plan, place: Place, precision: Precision, moved: Replayed) -> list[Row]:
    """Whole gradients that backward fills: buffers that stay where ranks share memory, as many as are on their way
    elsewhere."""
    if plan.memory is None and place.one_memory and not place.on_gpu:
        largest = max((chunk.size for chunk in chunks if chunk.borrows), default=0)
        return [Row("gradients on loan", "device", BUFFERS * largest * precision.grad.itemsize)]
    return [Row("gradients on loan", "device", moved.on_loan, "backward")]


def _in_use(plan: Plan, place: Place, moved: Replayed) -> list[Row]:
    """Whole weights of chunks that pass: all of them within a tier without end, else what is used together; without a
    tier, one more, on its way."""
    if plan.memory is not None:
        return [Row("weights in use", "device", moved.all_used if place.budget is None else moved.together, "backward")]
    return [Row("weights in use", "device", min(moved.all_used, moved.together + moved.largest), "backward")]

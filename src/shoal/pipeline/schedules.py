"""The schedules by name: each is a pure function of ranks, chunks and microbatches to an order of actions for each
rank.

    gpipe        all forwards, then all backwards
                 Huang et al. 2019, arXiv 1811.06965
    1f1b         one forward, one backward, after as many forwards as ranks behind
                 PipeDream-flush; Narayanan et al. 2021, arXiv 2006.09503
    interleaved  1f1b over several chunks a rank, in groups of as many microbatches as ranks
                 Narayanan et al. 2021, arXiv 2104.04473
    zb1p         1f1b with backward in two halves: the weights' half fills what would be waiting
                 Qi et al. 2023, arXiv 2401.10241
    zbv          backward in two halves, with two chunks a rank, there and back
                 Qi et al. 2024, arXiv 2405.15362
    pipedream    without a flush: each backward is followed by its update
                 Narayanan et al. 2019 (SOSP)
    2bw          without a flush: one update for every `every` microbatches
                 Narayanan et al. 2021, arXiv 2006.09503
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from shoal.errors import UserError, check_choice
from shoal.pipeline.actions import Action, Kind, Schedule, as_orders
from shoal.pipeline.simulate import Costs, simulate


@lru_cache(maxsize=1024)
def make_schedule(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, every: int | None = None
) -> Schedule:
    """Makes the schedule called `name`, once: the planner asks many times for one of hundreds of ranks.

    ranks, microbatches: of the pipeline, at least 1 each
    chunks: stages per rank, by default 2 of interleaved and zbv, else 1
    every: microbatches per update of 2bw, by default as many as ranks

    Raises UserError for values that the schedule does not take.
    """
    check_choice(f'plan.schedule = "{name}" is none of', name, SCHEDULES)
    if ranks < 1 or microbatches < 1:
        raise UserError(f"a pipeline of {ranks} ranks and {microbatches} microbatches: both must be at least 1")
    usual = {"interleaved": 2, "zbv": 2}.get(name, 1)
    chunks = usual if chunks is None else chunks
    if chunks < 1 or (chunks > 1 and name not in _CHUNKED) or (name == "zbv" and chunks != 2):
        raise UserError(
            f'plan.schedule = "{name}" takes '
            f"{'2 chunks' if name == 'zbv' else '1 chunk' if name not in _CHUNKED else '1 chunk or more'} a rank, not "
            f"{chunks}"
        )
    if every is not None and name != "2bw":
        raise UserError(f'plan.schedule = "{name}" has no parameter every, which is of 2bw')
    if name == "2bw":
        return _without_flush(name, ranks, microbatches, ranks if every is None else every)
    return SCHEDULES[name](ranks, microbatches, chunks)


def _gpipe(ranks: int, microbatches: int, chunks: int) -> Schedule:
    orders = [
        [Action("F", rank, each) for each in range(microbatches)]
        + [Action("B", rank, each) for each in range(microbatches)]
        for rank in range(ranks)
    ]
    return Schedule("gpipe", ranks, 1, microbatches, as_orders(orders))


def _1f1b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    orders = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank - 1)
        order = [Action("F", rank, each) for each in range(ahead)]
        for each in range(microbatches):
            if each + ahead < microbatches:
                order.append(Action("F", rank, each + ahead))
            order.append(Action("B", rank, each))
        orders.append(order)
    return Schedule("1f1b", ranks, 1, microbatches, as_orders(orders))


def _interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Sends groups of as many microbatches as ranks through a rank's chunks in turn; the last group may be smaller."""
    groups = [range(start, min(start + ranks, microbatches)) for start in range(0, microbatches, ranks)]
    orders = []
    for rank in range(ranks):
        forwards = [
            Action("F", chunk * ranks + rank, each) for group in groups for chunk in range(chunks) for each in group
        ]
        backwards = [
            Action("B", chunk * ranks + rank, each)
            for group in groups
            for chunk in reversed(range(chunks))
            for each in group
        ]
        # as many forwards first as are under way to the last stage and back
        ahead = 2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0]) if chunks > 1 else ranks - rank - 1
        ahead = len(forwards) if len(groups[-1]) < ranks < microbatches and chunks > 1 else min(ahead, len(forwards))
        order = forwards[:ahead]
        for place, backward in enumerate(backwards):
            order += forwards[ahead + place : ahead + place + 1]
            order.append(backward)
        orders.append(order)
    return Schedule("interleaved", ranks, chunks, microbatches, as_orders(orders))


def _without_flush(name: str, ranks: int, microbatches: int, every: int) -> Schedule:
    if every < 1:
        raise UserError(f"plan.schedule: every = {every}: an update takes at least 1 microbatch")
    orders = []
    for rank, order in enumerate(_1f1b(ranks, microbatches, 1).orders):
        with_updates: list[Action] = []
        for action in order:
            with_updates.append(action)
            if action.kind == "B" and (action.microbatch + 1) % every == 0:
                with_updates.append(Action("U", rank, action.microbatch))
        orders.append(with_updates)
    return Schedule(name, ranks, 1, microbatches, as_orders(orders), flushes=False)


def _pipedream(ranks: int, microbatches: int, chunks: int) -> Schedule:
    return _without_flush("pipedream", ranks, microbatches, 1)


def _zb1p(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Takes the order of 1f1b, or interleaved, and defers the weights' half of a backward by as many backwards as there
    are ranks before this one. So all ranks end together, with the same peak memory."""
    base = (_1f1b if chunks == 1 else _interleaved)(ranks, microbatches, chunks)
    orders = []
    for rank, order in enumerate(base.orders):
        split: list[Action] = []
        put_off: list[Action] = []
        for action in order:
            if action.kind == "F":
                split.append(action)
                continue
            split.append(Action("I", action.stage, action.microbatch))
            put_off.append(Action("W", action.stage, action.microbatch))
            if len(put_off) > rank:
                split.append(put_off.pop(0))
        orders.append(split + put_off)
    return _joined(replace(base, name="zb1p", orders=as_orders(orders)))


def _zbv(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Makes the order of the paper, which is for 2 ranks - 1 microbatches or more; for fewer the shorter one of that
    and a greedy simulation."""
    empty = Schedule("zbv", ranks, 2, microbatches, (), "v")
    found = _v_filled(empty)
    if microbatches < 2 * ranks - 1:
        found = min(found, _v_by_trial(empty), key=lambda each: simulate(each, Costs.even(each.stages)).seconds)
    return _joined(found)


def _v_filled(empty: Schedule) -> Schedule:
    """Makes the order of the paper.

    Each rank fills the way down and up with forwards, then alternates between its chunks, with a forward and both
    halves of a backward. At the end it defers as many weights' halves as there are ranks before it, which wait for
    inputs' halves.
    """
    ranks = empty.ranks
    microbatches = max(empty.microbatches, 2 * ranks - 1)
    orders = []
    for rank in range(ranks):
        down, up = empty.stages_of(rank)
        filled, behind = 2 * ranks - rank - 1, ranks - rank
        pattern = [
            *_each(down, "F") * (filled - rank),
            *(_each(up, "F") + _each(down, "F")) * rank,
            *_each(up, "F", "I", "W") * behind,
            *(_each(down, "F", "I", "W") + _each(up, "F", "I", "W")) * (microbatches - filled),
            *(_each(down, "I", "W") + _each(up, "F", "I", "W")) * (filled - ranks),
            *(_each(down, "I") + _each(up, "I")) * rank,
            *_each(down, "I", "W") * behind,
            *_each(up, "W") * rank,
            *_each(down, "W") * rank,
        ]
        number: Counter[tuple[Kind, int]] = Counter()
        order = []
        for kind, stage in pattern:
            order.append(Action(kind, stage, number[kind, stage]))
            number[kind, stage] += 1
        orders.append([action for action in order if action.microbatch < empty.microbatches])
    return replace(empty, orders=as_orders(orders))


def _each(stage: int, *kinds: Kind) -> list[tuple[Kind, int]]:
    return [(kind, stage) for kind in kinds]


def _v_by_trial(empty: Schedule) -> Schedule:
    """Makes an order by a greedy simulation in unit time.

    A free rank takes the input half of the oldest microbatch's backward that is ready; else a forward, of the stage
    nearest to the loss, while it keeps fewer activations than two per rank; else the oldest weights' half.
    """
    ranks, microbatches = empty.ranks, empty.microbatches
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    ends: dict[Action, int] = {}
    number: Counter[tuple[str, int]] = Counter()  # the next microbatch of each kind and stage
    live, time = [0] * ranks, 0

    def ready(kind: Kind, stage: int) -> Action | None:
        action = Action(kind, stage, number[kind, stage])
        if action.microbatch == microbatches:
            return None
        needs = (
            [Action("F", stage, action.microbatch)]
            if kind == "I"
            else [Action("I", stage, action.microbatch)]
            if kind == "W"
            else []
        )
        if kind == "F" and stage:
            needs.append(Action("F", stage - 1, action.microbatch))
        if kind == "I" and stage < empty.stages - 1:
            needs.append(Action("I", stage + 1, action.microbatch))
        return action if all(ends.get(need, time + 1) <= time for need in needs) else None

    def choose(rank: int) -> Action | None:
        for kind in ("I", "F", "W"):
            there = [action for stage in empty.stages_of(rank) if (action := ready(kind, stage)) is not None]
            if there and not (kind == "F" and live[rank] >= 2 * ranks):
                return max(there, key=lambda action: action.stage) if kind == "F" else min(there, key=_age)
        return None

    while sum(map(len, orders)) < 3 * empty.stages * microbatches:
        chosen = [choose(rank) for rank in range(ranks)]
        time += 1
        for rank, action in enumerate(chosen):
            if action is not None:
                orders[rank].append(action)
                ends[action] = time
                number[action.kind, action.stage] += 1
                live[rank] += {"F": 1, "W": -1}.get(action.kind, 0)
    return replace(empty, orders=as_orders(orders))


def _joined(schedule: Schedule) -> Schedule:
    """Replaces `I` followed by its `W` by `B`, which computes faster than both, where that delays nothing.

    It delays nothing if in unit time the schedule ends as early: those that wait for `I` can wait until `W` is done
    too.
    """
    costs = Costs.even(schedule.stages)
    times = simulate(schedule, costs)
    # the actions that wait for each action
    after: dict[Action, set[Action]] = {action: set() for order in schedule.orders for action in order}
    pairs = set()
    for order in schedule.orders:
        for action, then in pairwise(order):
            after[action].add(then)
            if action.kind == "I" and then == replace(action, kind="W"):
                pairs.add(action)
        for action in order:
            for need in schedule.needs(action):
                after[need].add(action)
    left: dict[Action, float] = {}  # time from the start of an action to the end of all that depends on it
    whole: dict[Action, Action] = {}
    gone: set[Action] = set()
    for action, start, _ in sorted((span for rank in times.spans for span in rank), key=lambda span: -span[1]):
        if action in pairs:
            rest = replace(action, kind="W")
            both = costs.of(action) + costs.of(rest) + _longest(left, (after[action] | after[rest]) - {rest})
            if start + both <= times.seconds:
                left[action], whole[action] = both, replace(action, kind="B")
                gone.add(rest)
                continue
        left[action] = costs.of(action) + _longest(left, after[action])
    orders = [[whole.get(action, action) for action in order if action not in gone] for order in schedule.orders]
    return replace(schedule, orders=as_orders(orders))


def _longest(left: dict[Action, float], actions: set[Action]) -> float:
    return max((left[each] for each in actions), default=0.0)


def _age(action: Action) -> tuple[int, int]:
    return action.microbatch, -action.stage


_CHUNKED = ("interleaved", "zb1p", "zbv")
SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb1p": _zb1p,
    "zbv": _zbv,
    "pipedream": _pipedream,
    "2bw": lambda ranks, microbatches, chunks: _without_flush("2bw", ranks, microbatches, ranks),
}

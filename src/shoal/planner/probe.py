"""What a small model's forward and backward take on this machine's cores: a few microbatches of it are run for real,
beside which what is counted (see computing) is off by a factor that the model's own operations decide.

Of large models, whose products are large, what is counted is near, and running them would take long: they are not run.
Nor is one on an accelerator: of few rows it shows how late the host launches, which says nothing of many.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch.distributed as dist

from shoal.comm import World
from shoal.comm.first import from_first
from shoal.device import CPU, is_accelerator
from shoal.module.build import without_values
from shoal.planner.computing import FORWARD, UNADDED, counted_again, seconds_of
from shoal.planner.degrees import Spread
from shoal.planner.kept import crowding, forget, in_turn, keep, key_of, read, threads_of
from shoal.planner.kept_profiles import name_of
from shoal.planner.prepare import Subject
from shoal.planner.running import TIMES, Alone, Ran, Together, run
from shoal.planner.task import Probed, Task

log = logging.getLogger(__name__)

MOST_PARAMETERS = 3 * 10**7
LEAST = 0.25
"""The least factor of what is computed again: it is the difference of two times."""
BUSY, SHORT = 20.0, 0.1
"""How many times longer than counted, and how many seconds, a forward and backward take at most whose time is kept: on
a machine with other work a model took 80 times as long. Of a short one Python alone may take a large part."""


def probe(subject: Subject, task: Task, settings: object = None, together: Sequence[Ran] = ()) -> Task:
    """Returns `task` with how many times longer than counted the model of `subject` takes, of microbatches of ever more
    rows until one takes ENOUGH seconds. As it is for a model that is large or does not run alone, where the task's
    cluster is not this machine's cores, and in a process group of torch's, of which a forward may call a collective.

    settings: what the model is made by, under which what it takes is kept; None for one that is not kept.
    together: what `run_together` returned, where these ranks have run it; else what it once kept for as many of them,
    else what a rank alone takes.
    """
    cluster, large = task.cluster, task.profile.parameters > MOST_PARAMETERS
    if large or _meets_others() or not cluster.is_here or not all(device.on_host for device in cluster.devices):
        return task
    own = cluster.hosts[0].device
    rows, threads = _tried(task.rows, task.microbatch), threads_of(CPU, cluster.per_host)
    key_with = partial(_key, subject, rows, threads, settings)
    if shared := together or (_known(key_with(cluster.per_host)) if cluster.per_host > 1 else ()):
        return _with(shared, task, own.slower, key_with(cluster.per_host))
    if cluster.per_host > 1 and task.microbatch is not None:  # ranks may have run it when a microbatch was searched
        key = _key(subject, _tried(task.rows, None), threads, settings, cluster.per_host)
        if (ran := _known(key)) and any(each.rows == task.microbatch for each in (*ran, *_others(ran, task.rows))):
            return _with(ran, task, own.slower, key)
    with in_turn(partial(_known, key_with(1))) as ran:
        if ran is None:
            log.info("running the model for a moment to time it, once a month")
            ran = run(subject, rows, threads, Alone())
            _keep(key_with(1), ran)
    return _with(ran, task, own.crowd * own.slower, key_with(1))


def run_together(
    world: World, subject: Subject, rows: int, microbatch: int | None, settings: object = None
) -> tuple[Ran, ...]:
    """Returns what a small model takes where all ranks of a host run it at once: those that share cores also take the
    caches and the memory's bandwidth from each other. Nothing for a single rank, and where `probe` would run none. A
    collective call.

    rows: of a global batch; microbatch: rows of a forward, where they are given; settings: see `probe`.
    """
    if world.size == 1:
        return ()
    per_host = world.per_host  # as of the cluster that these ranks are
    tried, threads = _tried(rows, microbatch), threads_of(CPU, per_host)
    key = _key(subject, tried, threads, settings, per_host)

    def known() -> tuple[Ran, ...] | None:
        none = per_host == 1 or is_accelerator(world.device) or _meets_others() or _is_large(subject)
        return () if none else _known(key)

    with ExitStack() as held:
        told = from_first(world.everyone, lambda: held.enter_context(in_turn(known)))
        if told is not None:
            return tuple(Ran(*each) for each in told)
        log.info("running the model for a moment on all ranks to time it, once a month")
        ran = run(subject, tried, threads, Together(world, crowding(CPU, per_host)))
        if world.rank == 0:
            _keep(key, ran)
    return ran


def _is_large(subject: Subject) -> bool:
    """Whether a model has more than MOST_PARAMETERS, or is not known without its values."""
    try:
        made = without_values(subject.factory)
    except Exception:  # somebody else's constructor, whose error is told where the model is built
        return True
    return made is None or sum(each.numel() for each in made.parameters()) > MOST_PARAMETERS


def _meets_others() -> bool:
    """Whether a forward might wait for other processes, which make none."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _key(subject: Subject, rows: Sequence[int], threads: int, settings: object, ranks: int) -> str | None:
    """The key of what so many ranks that run at once take; None where nothing is kept."""
    if settings is None:
        return None
    return key_of("ran", CPU, subject.precision.model, threads, ranks, name_of(settings, subject), *rows)


def _known(key: str | None) -> tuple[Ran, ...] | None:
    """What is kept; None for nothing."""
    known = None if key is None else read(key)
    with suppress(KeyError, TypeError):
        return None if known is None else tuple(Ran(*each) for each in known["ran"])
    return None


def _keep(key: str | None, ran: Sequence[Ran]) -> None:
    if key is not None:
        keep(key, {"ran": [tuple(each) for each in ran], "at": time.time()})


def _with(ran: Sequence[Ran], task: Task, slower: float, key: str | None) -> Task:
    """The task with what its model took (see `_factors`), and how much longer Python takes that comes once between its
    microbatches, however many rows these have."""
    if cold := [each.cold for each in ran if each.cold]:
        hosts = (
            replace(host, device=replace(host.device, cold=statistics.median(cold))) for host in task.cluster.hosts
        )
        task = replace(task, cluster=replace(task.cluster, hosts=tuple(hosts)))
    return replace(task, probed=_factors(ran, task, slower, key))


def _factors(ran: Sequence[Ran], task: Task, slower: float, key: str | None) -> tuple[Probed, ...]:
    """How many times longer forward, backward and what is computed again took, by rows, than is counted of a device
    that was `slower` times faster than the task's. Where other work may have made it so long, it is not kept under
    `key` any more."""
    device, found, parts = task.cluster.hosts[0].device, list[Probed](), task.profile.parts
    others = [] if any(each.rows == task.microbatch for each in ran) else _others(ran, task.rows)
    for each in (*ran, *others):
        how = Spread(), each.rows
        forward, backward = (
            sum(seconds_of(part, *how, times, device, task.numbers, False) for part in parts) / slower
            for times in (FORWARD, UNADDED)
        )
        factors = each.forward / forward, each.backward / backward
        counted = counted_again([part for part in parts if part.is_block], *how, device, task.numbers, False)
        again = (
            max(LEAST, slower * took / own) if took and own else factors[0]
            for took, own in zip((each.some, each.full), counted, strict=True)
        )
        found.append(Probed(each.rows, *factors, *again))
        long = each in ran and max(SHORT, BUSY * (forward + backward)) < each.forward + each.backward
        if key is not None and long:
            log.info("the model took %g times what is counted: it is timed again the next time", max(factors))
            forget(key)
    return tuple(sorted(found))


MORE = 2, 4, 16
"""Times as many rows as the most that were timed, for which it is told what they would take."""
EACH = 0.75
"""The share at least of a row's forward and backward that comes with each of these more rows, and not once with all:
that is the difference of two times."""


def _others(ran: Sequence[Ran], most: int) -> list[Ran]:
    """What other numbers of rows than were timed would take, between those and up to `most`. A part of a microbatch's
    time comes once, of Python and of products that reach little with few rows, the rest with each row: by as much as
    the two next in size that were timed differ."""
    found = []
    for one, last in pairwise(sorted(ran)):
        if 2 * one.rows < last.rows:
            found.append(_at(2 * one.rows, one, last, 0.0))
    if len(ran) > 1:
        found += [_at(rows, one, last, EACH) for times in MORE if (rows := times * last.rows) <= most]
    return found


def _at(rows: int, one: Ran, last: Ran, least: float) -> Ran:
    """What so many rows would take; `least`: see EACH."""

    def of(before: float, took: float, least: float) -> float:
        mean, more = took / last.rows, (took - before) / (last.rows - one.rows)
        return took + (rows - last.rows) * min(mean, max(least * mean, more))

    ways = zip((one.some, one.full), (last.some, last.full), strict=True)  # hooks of Python come once, and may be all
    again = (of(before, took, 0.0) if before and took else rows / last.rows * took for before, took in ways)
    return Ran(rows, of(one.forward, last.forward, least), of(one.backward, last.backward, least), *again)


def _tried(rows: int, microbatch: int | None) -> tuple[int, ...]:
    """The numbers of rows of which microbatches are run, where a global batch has so many `rows`. Of a microbatch that
    is given a part is run too, which takes what ranks do not divide among them, such as Python."""
    if microbatch is not None:
        return (microbatch, microbatch // TIMES) if microbatch >= TIMES else (microbatch,)
    return tuple(TIMES**power for power in range(math.floor(math.log(rows, TIMES)) + 1))

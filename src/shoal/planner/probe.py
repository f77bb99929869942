"""What a small model's forward and backward take on this machine's cores: a few microbatches of it are run for real,
beside which what is counted (see computing) is off by a factor that the model's own operations decide.

Of large models, whose products are large, what is counted is near, and running them would take long: they are not run.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from shoal.device import CPU
from shoal.errors import ShoalError
from shoal.module.random import host_draws
from shoal.native.heap import keep_freed_memory
from shoal.planner.computing import FORWARD, UNADDED, seconds_of
from shoal.planner.degrees import Spread
from shoal.planner.kept import keep, key_of, read, threads_of
from shoal.planner.kept_profiles import name_of
from shoal.planner.prepare import Subject
from shoal.planner.task import Probed, Task
from shoal.training.loss import sums_of

log = logging.getLogger(__name__)

MOST_PARAMETERS = 3 * 10**7
ENOUGH, TIMES = 0.3, 4
"""Seconds of a forward and backward after which no more rows are tried, and how many times as many are tried next."""
ROUNDS = 3


@dataclass(frozen=True)
class Ran:
    """Seconds of a forward, and of a backward, of so many rows on one rank alone."""

    rows: int
    forward: float
    backward: float


def probe(subject: Subject, task: Task, settings: object = None) -> Task:
    """Returns `task` with how many times longer than counted the model of `subject` takes, of microbatches of ever more
    rows until one takes ENOUGH seconds. As it is for a model that is large or does not run alone, where the task's
    cluster is not this machine's cores, and in a process group of torch's, of which a forward may call a collective.
    `settings`: what the model is made by, under which what it takes is kept; None for one that is not kept."""
    cluster, large = task.cluster, task.profile.parameters > MOST_PARAMETERS
    if large or _meets_others() or not cluster.is_here or not all(device.on_host for device in cluster.devices):
        return task
    ran = _kept(subject, _tried(task.rows, task.microbatch), threads_of(CPU, cluster.per_host), settings)
    return replace(task, probed=_factors(ran, task))


def _meets_others() -> bool:
    """Whether a forward might wait for other processes, which make none."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _kept(subject: Subject, rows: Sequence[int], threads: int, settings: object) -> tuple[Ran, ...]:
    key = key_of("ran", CPU, subject.precision.model, threads, name_of(settings, subject), *rows)
    if settings is not None and (known := read(key)) is not None:
        with suppress(KeyError, TypeError):
            return tuple(Ran(*each) for each in known["ran"])
    log.info("running the model for a moment to time it, once a month")
    found = _run(subject, rows, threads)
    if settings is not None:
        keep(key, {"ran": [(each.rows, each.forward, each.backward) for each in found], "at": time.time()})
    return found


def _run(subject: Subject, rows: Sequence[int], threads: int) -> tuple[Ran, ...]:
    before, found = torch.get_num_threads(), list[Ran]()
    torch.set_num_threads(threads)
    keep_freed_memory()  # as of a rank
    try:
        with torch.random.fork_rng(devices=[]), host_draws(0):
            own = deepcopy(subject.factory())  # which may be the caller's own, to whom a forward is to do nothing
            module = own.to(subject.precision.model).train()
            for number in rows:
                found.append(_timed(subject, module, number))
                if found[-1].forward + found[-1].backward > ENOUGH / TIMES:
                    break
    except (ShoalError, RuntimeError, ValueError, TypeError) as error:
        log.info("the model does not run alone, so its time is counted: %s: %s", type(error).__name__, error)
    finally:
        torch.set_num_threads(before)
    return tuple(found)


def _timed(subject: Subject, module: torch.nn.Module, rows: int) -> Ran:
    batch = {key: torch.stack([value] * rows) for key, value in subject.sample.items()}
    taken = []
    for _ in range(1 + ROUNDS):  # the first one is not timed
        given = {key: value.clone() for key, value in batch.items()}  # a loss may write to it
        began = time.perf_counter()
        sums = sums_of(subject.loss, module, given, ())
        total = sum(sums.aux.values(), sums.total)
        between = time.perf_counter()
        total.backward()
        taken.append((between - began, time.perf_counter() - between))
        module.zero_grad()
    forward, backward = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    return Ran(rows, forward, backward)


def _factors(ran: Sequence[Ran], task: Task) -> tuple[Probed, ...]:
    """How many times longer than counted of the rates of one rank alone forward and backward took, by rows."""
    device, found = task.cluster.hosts[0].device, list[Probed]()
    alone, parts = device.crowd * device.slower, task.profile.parts
    for each in ran:
        forward, backward = (
            sum(seconds_of(part, Spread(), each.rows, times, device, task.numbers, False) for part in parts) / alone
            for times in (FORWARD, UNADDED)
        )
        found.append((each.rows, each.forward / forward, each.backward / backward))
    return tuple(found)


def _tried(rows: int, microbatch: int | None) -> tuple[int, ...]:
    """The numbers of rows of which microbatches are run, where a global batch has so many `rows`."""
    if microbatch is not None:
        return (microbatch,)
    return tuple(TIMES**power for power in range(math.floor(math.log(rows, TIMES)) + 1))

"""Records the computation, communication and memory of every rank in a few steps, early and in the middle of a run, and
what these steps and some more were spent on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, cast

from shoal.comm import Group
from shoal.comm import Span as Seen
from shoal.comm.ledger import Level
from shoal.device import is_accelerator, synchronize
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.jobs.memory import tiers
from shoal.jobs.record import Recorder
from shoal.report.jsonl import GoesOn, JsonLog
from shoal.report.levels import RANKS, MemoryTrace, memory_trace
from shoal.report.terms import Told, spent, together
from shoal.report.timeline import Span

Kept = tuple[list[Span], list[MemoryTrace], list[int]]
"""Spans, traces, and the steps after which the attempts began of which they are."""

FIRST, COUNT = 2, 3  # the first steps pay for warm-up
EVERY = 200
"""Steps between two that are sampled for what they were spent on, beside those that are recorded: the calls of groups
are timed, and what came of it is gathered once, which takes less than a step of a small model does."""


class Recording:
    """Switches the ledger's recording on for a few steps of this attempt.

    begin: step at which the attempt begins.
    total: step at which it ends; None where not known.
    """

    def __init__(self, engine: Engine, run_dir: Path, begin: int, total: int | None) -> None:
        self._engine, self._run_dir, self._begin = engine, run_dir, begin
        middle = begin + (total - begin) // 2 if total is not None else begin + 100
        self._steps = {*range(begin + FIRST, begin + FIRST + COUNT), *range(middle, middle + COUNT)}
        self._samples, self._undrawn = set[int](), set[int]()
        """Further steps whose terms are told, and those of them that were."""
        self._began: float | None = None
        self._told: tuple[int, Told] | None = None
        self._group: Group | None = None
        self._spans: list[Span] = []
        self._levels: list[Level] = []
        self._known: dict[int, tuple[dict[str, int], bool]] = {}
        """By recorded step, under whose plan it was: the budgets of its tiers, and whether they count all."""
        self.kept: Kept = [], [], [begin]
        """What is not written yet of attempts that were cut short, this one among them."""

    def before(self, step: int) -> None:
        engine, ledger = self._engine, self._engine.ledger
        if ledger.recording:
            self._take()
        is_drawn = step in self._steps
        recording = is_drawn or self._is_sampled(step)
        ledger.step = step if recording else ledger.step  # before, since lanes may be at work
        ledger.recording, ledger.watch, self._began = recording, None, None
        if not recording:
            return
        synchronize(engine.device)
        self._began = time.perf_counter()
        if not is_drawn:
            self._undrawn.add(step)
            return
        now = tiers(engine)
        budgets = {_name(tier.name): tier.capacity for tier in now if tier.capacity is not None}
        self._known[step] = budgets, engine.parts.tier is not None or is_accelerator(engine.device)
        at = time.time()
        for tier in now:
            tier.note(at)
        if is_accelerator(engine.device):
            ledger.watch = now[0].look

    def ended(self) -> None:
        """Sees what the step was spent on that has ended, if it is one of those."""
        if self._began is None:
            return
        synchronize(self._engine.device)
        seconds, self._began = time.perf_counter() - self._began, None
        self._told = self._engine.ledger.step, spent(self._take(), seconds, self._engine.world.host)

    def tell(self, recorder: Recorder) -> None:
        """Has rank 0 record what all ranks have spent the last step on, if it was sampled. A collective call then."""
        if self._told is None:
            return
        (step, own), self._told, world = self._told, None, self._engine.world
        if self._group is None:
            steps_overlap = self._engine.parts.lag > 0 and not is_accelerator(self._engine.device)
            self._group = world.group("terms", world.everyone.ranks) if steps_overlap else world.everyone
        everyone = self._group.all_gather_object(own.to_wire())
        if world.rank == 0:
            recorder.terms(together(step + 1, list(map(Told.from_wire, everyone)), world.per_host))

    def changed(self, step: int) -> None:
        """Samples steps under the plan with which the step numbered `step` begins: the first ones pay for warm-up."""
        self._samples.update(range(step + FIRST, step + FIRST + COUNT))

    def _is_sampled(self, step: int) -> bool:
        return step in self._samples or (step % EVERY == 0 and step >= self._begin + FIRST)

    def cut_short(self) -> None:
        """Ends the recording on this rank alone, where others are gone. What it has of complete steps is kept, for
        whoever takes it over; on an accelerator nothing, whose work may never end."""
        engine, rank = self._engine, self._engine.world.rank
        engine.ledger.recording = False
        if is_accelerator(engine.device):
            return
        spans, traces = self._all_spans(), self._traces(rank)
        done = engine.step_index  # the next one was under way
        self.kept[0].extend(span for span in spans if span.step <= done)
        self.kept[1].extend(trace for trace in traces if trace.step <= done and rank < RANKS)

    def take_over(self, kept: Kept) -> None:
        """Writes at its own end also what earlier attempts have kept, but for steps that are trained again."""
        spans, traces, began = kept
        self.kept[2].extend(began)
        self.kept[0].extend(span for span in spans if span.step <= self._begin)
        self.kept[1].extend(trace for trace in traces if trace.step <= self._begin)

    def close(self, recorder: Recorder) -> None:
        """Gathers the records of all ranks; rank 0 writes timeline.jsonl and memory.jsonl. A collective call."""
        self._engine.ledger.recording = False
        group = self._engine.world.everyone
        spans, traces = self._all_spans(), self._traces(group.rank) if group.rank < RANKS else []
        everyone = group.all_gather_object((self.kept[0] + spans, self.kept[1] + traces))
        begins = list(self.kept[2])
        for each in self.kept:
            each.clear()
        if group.rank != 0:
            return
        try:
            for place, name in enumerate(("timeline.jsonl", "memory.jsonl")):
                path = self._run_dir / name
                goes_on = [GoesOn(min(begins))] if begins and path.exists() else []
                log = JsonLog(path)
                for own in (goes_on, *(each[place] for each in everyone)):
                    log.write(own)
                log.close()
        except (OSError, UserError) as error:  # the one to write, the other to open
            recorder.warning(f"the timeline cannot be written: {error}")

    def _take(self) -> list[Seen]:
        """Takes what the ledger has recorded; it is kept, but for steps that are not drawn."""
        ledger, rank = self._engine.ledger, self._engine.world.rank
        taken = ledger.take()
        self._spans += (_drawn(span, rank) for span in taken if span.step not in self._undrawn)
        self._levels += (level for level in ledger.take_levels() if level.step in self._known)
        return taken

    def _all_spans(self) -> list[Span]:
        self._take()
        spans, self._spans = self._spans, []
        return spans

    def _traces(self, rank: int) -> list[MemoryTrace]:
        steps = dict[int, list[Level]]()
        levels, self._levels = self._levels, []
        for level in levels:
            steps.setdefault(level.step, []).append(level)
        traces = [
            memory_trace(
                step + 1,
                rank,
                [(level.at, _name(level.tier), level.role, level.nbytes) for level in levels],
                *self._known[step],
            )
            for step, levels in steps.items()
        ]
        return [trace for trace in traces if trace is not None]


def _drawn(span: Seen, rank: int) -> Span:
    return Span(
        step=span.step + 1,
        rank=rank,
        lane=cast(Literal["compute", "comm", "wait", "queue", "stage"], span.lane),
        name=span.name,
        start=span.start,
        seconds=span.seconds,
        bytes=span.payload,
        phase=span.phase,
    )


def _name(tier: str) -> str:
    """Returns "device" for "plan.memory.device"."""
    return tier.rpartition(".")[2]

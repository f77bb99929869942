"""Records the computation, communication and memory of every rank in a few steps, early and in the middle of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, cast

from shoal.comm.ledger import Level
from shoal.device import is_accelerator
from shoal.engine import Engine
from shoal.jobs.memory import tiers
from shoal.jobs.record import Recorder
from shoal.report.jsonl import JsonLog
from shoal.report.levels import RANKS, MemoryTrace, memory_trace
from shoal.report.timeline import Span

Kept = tuple[list[Span], list[MemoryTrace]]

FIRST, COUNT = 2, 3  # the first steps pay for warm-up


class Recording:
    """Switches the ledger's recording on for a few steps of this attempt.

    begin: step at which the attempt begins.
    total: step at which it ends; None where not known.
    """

    def __init__(self, engine: Engine, run_dir: Path, begin: int, total: int | None) -> None:
        self._engine, self._run_dir, self._begin = engine, run_dir, begin
        middle = begin + (total - begin) // 2 if total is not None else begin + 100
        self._steps = {*range(begin + FIRST, begin + FIRST + COUNT), *range(middle, middle + COUNT)}
        self._known: dict[int, tuple[dict[str, int], bool]] = {}
        """By recorded step, under whose plan it was: the budgets of its tiers, and whether they count all."""
        self.kept: Kept = [], []
        """What is not written yet of attempts that were cut short, this one among them."""

    def before(self, step: int) -> None:
        ledger = self._engine.ledger
        ledger.recording, ledger.watch = step in self._steps, None
        if not ledger.recording:
            return
        ledger.step = step
        now = tiers(self._engine)
        budgets = {_name(tier.name): tier.capacity for tier in now if tier.capacity is not None}
        self._known[step] = budgets, self._engine.parts.tier is not None or is_accelerator(self._engine.device)
        at = time.time()
        for tier in now:
            tier.note(at)
        if is_accelerator(self._engine.device):
            ledger.watch = now[0].look

    def cut_short(self) -> None:
        """Ends the recording on this rank alone, where others are gone. What it has of complete steps is kept, for
        whoever takes it over; on an accelerator nothing, whose work may never end."""
        engine, rank = self._engine, self._engine.world.rank
        engine.ledger.recording = False
        if is_accelerator(engine.device):
            return
        spans, traces = self._spans(rank), self._traces(rank)
        done = engine.step_index  # the next one was under way
        self.kept[0].extend(span for span in spans if span.step <= done)
        self.kept[1].extend(trace for trace in traces if trace.step <= done and rank < RANKS)

    def take_over(self, kept: Kept) -> None:
        """Writes at its own end also what earlier attempts have kept, but for steps that are trained again."""
        spans, traces = kept
        self.kept[0].extend(span for span in spans if span.step <= self._begin)
        self.kept[1].extend(trace for trace in traces if trace.step <= self._begin)

    def close(self, recorder: Recorder) -> None:
        """Gathers the records of all ranks; rank 0 writes timeline.jsonl and memory.jsonl. A collective call."""
        self._engine.ledger.recording = False
        group = self._engine.world.everyone
        spans, traces = self._spans(group.rank), self._traces(group.rank) if group.rank < RANKS else []
        everyone = group.all_gather_object((self.kept[0] + spans, self.kept[1] + traces))
        for each in self.kept:
            each.clear()
        if group.rank != 0:
            return
        try:
            timeline, memory = JsonLog(self._run_dir / "timeline.jsonl"), JsonLog(self._run_dir / "memory.jsonl")
            for spans, traces in everyone:
                timeline.write(spans)
                memory.write(traces)
            timeline.close()
            memory.close()
        except OSError as error:
            recorder.warning(f"the timeline cannot be written: {error}")

    def _spans(self, rank: int) -> list[Span]:
        return [
            Span(
                step=span.step + 1,
                rank=rank,
                lane=cast(Literal["compute", "comm", "wait", "queue", "stage"], span.lane),
                name=span.name,
                start=span.start,
                seconds=span.seconds,
                bytes=span.payload,
                phase=span.phase,
            )
            for span in self._engine.ledger.take()
        ]

    def _traces(self, rank: int) -> list[MemoryTrace]:
        engine, steps = self._engine, dict[int, list[Level]]()
        for level in engine.ledger.take_levels():
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


def _name(tier: str) -> str:
    """Returns "device" for "plan.memory.device"."""
    return tier.rpartition(".")[2]

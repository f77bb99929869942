"""Records what every rank computed and sent in a few steps, early and in the middle of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from shoal.engine import Engine
from shoal.jobs.record import Recorder
from shoal.report.timeline import Span, TimelineLog

FIRST, COUNT = 2, 3  # the first steps pay for warm-up


class Recording:
    """Switches the ledger on for some steps of this attempt, which begins at `begin` and ends at `total` (None: not known)."""

    def __init__(self, engine: Engine, run_dir: Path, begin: int, total: int | None) -> None:
        self._engine, self._run_dir = engine, run_dir
        middle = begin + (total - begin) // 2 if total is not None else begin + 100
        self._steps = {*range(begin + FIRST, begin + FIRST + COUNT), *range(middle, middle + COUNT)}

    def before(self, step: int) -> None:
        self._engine.ledger.recording = step in self._steps

    def close(self, recorder: Recorder) -> None:
        """Gathers the spans of all ranks, which all call it, and writes timeline.jsonl; where that fails, says so."""
        self._engine.ledger.recording = False
        group = self._engine.world.everyone
        spans = [
            Span(
                step=span.step + 1,
                rank=group.rank,
                lane=cast(Literal["compute", "comm", "wait", "queue"], span.lane),
                name=span.name,
                start=span.start,
                seconds=span.seconds,
                bytes=span.payload,
                phase=span.phase,
            )
            for span in self._engine.ledger.take()
        ]
        everyone = group.all_gather_object(spans)
        if group.rank != 0:
            return
        try:
            log = TimelineLog(self._run_dir / "timeline.jsonl")
            for of_rank in everyone:
                log.write(of_rank)
            log.close()
        except OSError as error:
            recorder.warning(f"the timeline cannot be written: {error}")

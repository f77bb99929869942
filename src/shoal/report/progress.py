"""The progress line of a run, and the table at its end."""

from __future__ import annotations

import errno
import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal import units

from .metrics import RunRecords, StepRecord
from .result import summarize

SMOOTHING = 0.9
"""Decay of a step's tokens and seconds at each further step: the rate shown covers about the last ten steps."""

FRAMES_PER_SECOND = 10
BAR_WIDTH, SHORTEST_BAR = 24, 4


class Progress:
    """The progress line of rank 0.

    On a terminal the line is redrawn in place. Elsewhere, or with TERM=dumb, a plain line is written at the first step,
    then every `plain_interval` seconds, and at the last step.

    total: number of steps; None when it is not known.
    stream: where the line is written. What does not fit its disk is left out: a log in the run's directory must not end
        the training that may outlast a full disk.
    """

    def __init__(self, total: int | None, stream: TextIO, plain_interval: float = 10.0) -> None:
        self._total = total
        self._pace = Pace(total)
        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._interval = plain_interval
        self._drawn_at = float("-inf")
        self._last: StepRecord | None = None
        self._doing = ""
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._interval = 1 / FRAMES_PER_SECOND

    def update(self, record: StepRecord) -> None:
        """Takes in a step, and redraws the line if the interval has passed."""
        self._pace.add(record)
        self._last = record
        if time.monotonic() - self._drawn_at >= self._interval or record.step == self._total:
            self._draw(record)

    def message(self, text: str) -> None:
        """Prints `text` above the progress line: a warning, an evaluation."""
        self._print(Text(text))

    def under_way(self, text: str) -> None:
        """Shows what is happening between steps: in place of the progress line, or as a line of its own without a
        terminal. Texts that differ only after a colon are shown there at most once per interval."""
        what = text.partition(":")[0]
        if self._live is not None:
            self._live.update(_fitting(Text(text)), refresh=True)
        elif what != self._doing or time.monotonic() - self._drawn_at >= self._interval:
            self._drawn_at = time.monotonic()
            self.message(text)
        self._doing = what

    def close(self) -> None:
        """Draws the last state, which stays on the screen."""
        if self._last is not None:
            self._draw(self._last)
        if self._live is not None:
            self._live.stop()

    def _print(self, text: Text) -> None:
        if self._live is not None:
            self._console.print(text, soft_wrap=True)
            return
        try:
            self._stream.write(f"{text.plain}\n")  # the console would write what has failed once more
            self._stream.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise

    def _draw(self, record: StepRecord) -> None:
        self._drawn_at = time.monotonic()
        self._last = None
        self._doing = ""
        if self._live is None:
            self._print(Text(status_line(record, self._total, self._pace)))
            return
        line = status_line(record, self._total, self._pace, self._console.width)
        room = min(BAR_WIDTH, self._console.width - len(line) - 2)
        bar = progress_bar(record.step, self._total, room) if room >= SHORTEST_BAR else Text()
        self._live.update(_fitting(bar.append(f"{'  ' * bool(bar)}{line}")), refresh=True)


class Pace:
    """The smoothed tokens per second, and the remaining time."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._tokens = 0.0
        self._seconds = 0.0
        self._first: StepRecord | None = None
        self._latest: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        """Takes in a step. Both sums decay equally, so their ratio needs no correction at the start."""
        self._tokens = SMOOTHING * self._tokens + record.tokens
        self._seconds = SMOOTHING * self._seconds + record.seconds
        self._first = self._first or record
        self._latest = record

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def remaining_seconds(self) -> float | None:
        """The remaining time at the mean pace since the first step, with evaluations and checkpoints, but without the
        slow first step itself; None where the number of steps is not known."""
        if self._total is None or self._first is None or self._latest is None:
            return None
        done = self._latest.step - self._first.step
        each = (self._latest.time - self._first.time) / done if done > 0 else self._latest.seconds
        return each * (self._total - self._latest.step)


def _fitting(line: Text) -> Text:
    """Cuts `line` to one line of the terminal, since two could not be redrawn in place."""
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def status_line(record: StepRecord, total: int | None, pace: Pace, width: int | None = None) -> str:
    """Returns the text of the progress line: the most important parts that fit `width` characters (None: all)."""
    remaining = pace.remaining_seconds
    parts = [
        f"step {record.step}" if total is None else f"step {record.step:>{len(str(total))}}/{total}",
        f"loss {record.loss:.4f}",
        f"{units.count(pace.tokens_per_second)} tok/s",
        f"ETA {units.duration(remaining)}" if remaining is not None else "",
        f"LR {record.lr:.2e}",
        f"loss scale {record.loss_scale:g}" if record.loss_scale is not None else "",
        f"MFU {record.mfu:.0%}" if record.mfu is not None else "",
        units.size(record.memory_bytes),
    ]
    line, *rest = (part for part in parts if part)
    for part in rest:
        if width is not None and len(line) + 2 + len(part) > width:
            break
        line += f"  {part}"
    return line


def progress_bar(step: int, total: int | None, width: int) -> Text:
    """Returns a bar of `width` characters; an empty text where the number of steps is not known."""
    if not total:
        return Text()
    filled = min(width, width * step // total)
    return Text.assemble(("━" * filled, "cyan"), ("━" * (width - filled), "bright_black"))


def print_summary(records: RunRecords, stream: TextIO) -> None:
    """Prints the table at the end of a run."""
    Console(file=stream, highlight=False).print(summary_table(records))


def summary_table(records: RunRecords) -> Table:
    """Makes a table of the outcome of a run, one row per quantity."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bright_black")
    table.add_column()
    result = summarize(records)
    if result is None:
        table.add_row("steps", "none was completed")
    else:
        change = result.loss_after - result.loss_before
        loss = f"{result.loss_before:.4f} → {result.loss_after:.4f}  ({change:+.4f})"
        table.add_row(f"{result.measure} loss", Text(loss, style="bold"))
        table.add_row("steps", f"{result.steps:,}")
        table.add_row("tokens", units.count(result.tokens))
        table.add_row("time in steps", units.duration(result.seconds))
        table.add_row("throughput", f"{units.count(result.tokens_per_second)} tokens/s")
        if result.mfu is not None:
            table.add_row("MFU", f"{result.mfu:.0%} of the measured matmul peak")
        if any(record.loss_scale is not None for record in records.steps):
            skipped = sum(record.skipped for record in records.steps)
            table.add_row("loss scale", f"{records.steps[-1].loss_scale:g} at the end, {skipped} steps skipped")
        table.add_row("memory", f"{units.size(max(record.memory_bytes for record in records.steps))} at most")
    if records.checkpoints:
        table.add_row("last checkpoint", Text(records.checkpoints[-1].path))
    if records.warnings:
        table.add_row("warnings", str(len(records.warnings)))
    return table

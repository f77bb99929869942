from __future__ import annotations

import errno
import io
import os
import re
from dataclasses import replace

import pytest

from shoal.report.metrics import CheckpointRecord, EvalRecord, RunRecords, StepRecord, WarningRecord
from shoal.report.progress import Pace, Progress, print_summary, status_line
from tests.report.synthetic import step_record

pytestmark = pytest.mark.fast


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(number: int, *, seconds: float = 1.0, time: float | None = None) -> StepRecord:
    record = replace(step_record(number), step=number, tokens=1000, seconds=seconds, loss=2.5, lr=0.001, mfu=0.5)
    return replace(record, memory_bytes=2**30, time=float(number) if time is None else time)


class Full(io.StringIO):
    """A file on a disk that is full for the moment."""

    number: int | None = errno.ENOSPC

    def write(self, text: str) -> int:
        if self.number is not None:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


def test_a_log_on_a_full_disk_does_not_end_the_training() -> None:
    stream = Full()
    progress = Progress(9, stream, plain_interval=0.0)
    progress.update(step(1))
    progress.message("warning: the disk is full")
    stream.number = None
    progress.update(step(2))
    assert stream.getvalue().startswith("step 2/9")
    stream.number = errno.EPIPE  # nobody reads it: that ends a program, as anywhere
    with pytest.raises(OSError, match="Broken pipe"):
        progress.message("more")


def test_a_slow_first_step_fades_from_the_rate() -> None:
    pace = Pace(total=None)
    pace.add(step(1, seconds=10.0))
    assert pace.tokens_per_second == 100
    pace.add(step(2))
    # (0.9 * 1000 + 1000) / (0.9 * 10 + 1)
    assert pace.tokens_per_second == pytest.approx(190)
    for number in range(3, 200):
        pace.add(step(number))
    assert pace.tokens_per_second == pytest.approx(1000, rel=1e-3)


def test_the_time_left_counts_what_happens_between_steps() -> None:
    pace = Pace(total=10)
    assert pace.remaining_seconds is None
    pace.add(step(1, seconds=8.0, time=100.0))
    assert pace.remaining_seconds == 9 * 8.0
    # Two steps in six seconds, of which four went to an evaluation.
    pace.add(step(2, time=101.0))
    pace.add(step(3, time=106.0))
    assert pace.remaining_seconds == 7 * 3.0


def test_the_line() -> None:
    pace = Pace(total=1000)
    pace.add(step(12))
    expected = "step   12/1000  loss 2.5000  1.00k tok/s  ETA 16 min 28 s  LR 1.00e-03  MFU 50%  1.00 GiB"
    assert status_line(step(12), 1000, pace) == expected
    endless = Pace(total=None)
    endless.add(step(12))
    assert (
        status_line(replace(step(12), mfu=None), None, endless)
        == "step 12  loss 2.5000  1.00k tok/s  LR 1.00e-03  1.00 GiB"
    )


def run(stream: io.StringIO, interval: float) -> list[str]:
    progress = Progress(total=5, stream=stream, plain_interval=interval)
    for number in range(1, 6):
        progress.update(step(number))
        if number == 3:
            progress.message("validation loss [2.25]")
    progress.close()
    return stream.getvalue().splitlines()


def test_without_a_terminal_there_are_plain_lines_at_intervals() -> None:
    lines = run(io.StringIO(), interval=3600)
    assert [line.split("  ")[0] for line in lines] == ["step 1/5", "validation loss [2.25]", "step 5/5"]
    assert len(run(io.StringIO(), interval=0)) == 6


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert run(Terminal(), interval=0) == run(io.StringIO(), interval=0)


def test_a_terminal_gets_one_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    lines = run(Terminal(), interval=3600)
    assert "\x1b[2K" in "".join(lines), "the line is cleared before it is drawn again"
    assert any("validation loss [2.25]" in line for line in lines)
    assert "step 5/5" in lines[-1] or "step 5/5" in lines[-2]


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 132])
def test_the_line_fits_the_terminal_in_whole_parts(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line).strip("\r") for line in run(Terminal(), interval=0)]
    drawn = [line for line in lines if "step 5/5" in line][-1]
    assert len(drawn) <= columns
    parts = "step 5/5  loss 2.5000  1.00k tok/s  ETA 0 ms  LR 1.00e-03  MFU 50%  1.00 GiB"
    line = drawn[drawn.index("step") :].rstrip()
    assert parts == line or (parts.startswith(line + "  ") and len(line) + 12 > min(columns, len(parts)) - 5)
    assert ("━" in drawn) is (columns - len(line) >= 6)


def test_what_goes_on_between_steps_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    progress = Progress(total=5, stream=stream, plain_interval=3600)
    for text in ("evaluating", "evaluating: 1 of 9", "evaluating: 2 of 9", "writing: [1]"):
        progress.under_way(text)
    progress.update(step(1))
    assert stream.getvalue().splitlines()[:2] == ["evaluating", "writing: [1]"], "plain lines come at intervals"
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "30")
    terminal = Terminal()
    progress = Progress(total=5, stream=terminal)
    progress.under_way("evaluating: 3 of 9 " + "x" * 40)
    progress.update(step(1))
    progress.close()
    assert "evaluating: 3 of 9" in terminal.getvalue() and terminal.getvalue().count("\n") == 1, "all in one line"


def test_a_stopped_run_shows_its_last_step() -> None:
    stream = io.StringIO()
    progress = Progress(total=100, stream=stream, plain_interval=3600)
    progress.update(step(1))
    progress.update(step(2))
    progress.close()
    assert [line[:12] for line in stream.getvalue().splitlines()] == ["step   1/100", "step   2/100"]


def test_the_summary() -> None:
    records = RunRecords(
        steps=(step(1), replace(step(2), seconds=3.0, mfu=0.1)),
        evals=(EvalRecord(step=0, loss=5.5, tokens=1), EvalRecord(step=2, loss=2.25, tokens=1)),
        checkpoints=(CheckpointRecord(step=2, path="checkpoints/step-00000002", seconds=0.1),),
        warnings=(WarningRecord(message="-"),),
    )
    stream = io.StringIO()
    print_summary(records, stream)
    rows = {line[:15].strip(): line[15:].strip() for line in stream.getvalue().splitlines()}
    assert rows == {
        "validation loss": "5.5000 → 2.2500  (-3.2500)",
        "steps": "2",
        "tokens": "2.00k",
        "time in steps": "4.0 s",
        "throughput": "500 tokens/s",
        "MFU": "20% of the measured matmul peak",
        "memory": "1.00 GiB at most",
        "last checkpoint": "checkpoints/step-00000002",
        "warnings": "1",
    }


def test_the_summary_of_a_run_without_steps() -> None:
    stream = io.StringIO()
    print_summary(RunRecords(), stream)
    assert "none was completed" in stream.getvalue()

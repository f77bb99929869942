"""Logs of runs whose disk is full."""

from __future__ import annotations

import errno

import pytest

from shoal.report.metrics import MetricsLog, StepRecord


def fill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the disk be full when a log is to take the record of `step`."""
    written = MetricsLog.write

    def full(self, entry):
        if isinstance(entry, StepRecord) and entry.step == step:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self, entry)

    monkeypatch.setattr(MetricsLog, "write", full)

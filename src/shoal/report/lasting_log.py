"""The log of a run that may outlast a full disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .metrics import MetricsLog, Record


class LastingLog:
    """A MetricsLog that is given up where it cannot be written: a full disk must not end the training.

    warn: is told so, once.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._log: MetricsLog | None = MetricsLog(path)
        self._name, self._warn = path.name, warn

    def write(self, record: Record) -> None:
        """Appends a record, unless the log has been given up."""
        if self._log is None:
            return
        try:
            self._log.write(record)
        except OSError as error:
            self._log = None
            self._warn(f"warning: {self._name} cannot be written any more: {error}. Training goes on without it")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

"""The end of a run: why it ended, and its report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    reason: a sentence. signal: what stopped it, if one did. report: None but on rank 0, and where it could not be
    written, of which `unwritten` then says why.
    """

    run_dir: Path
    step: int
    reason: str
    signal: int | None
    report: Path | None
    unwritten: str = ""


def write_report(run_dir: Path) -> Path:
    """Calls `report.page.write_report`. Imported here, because its libraries take half as long to import as torch."""
    from shoal.report import page

    return page.write_report(run_dir)


def report_on(run_dir: Path) -> tuple[Path | None, str]:
    """Writes the report; returns its path, and on a full disk None and what is to be said."""
    try:
        return write_report(run_dir), ""
    except OSError as error:
        remedy = f"Free space there, then write it with: shoal report {run_dir}"
        return None, f"the report of {run_dir} cannot be written: {error}. {remedy}"

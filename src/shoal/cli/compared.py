"""`shoal plan --compare`: what the planner predicts of a run beside what the run recorded, as text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal import units
from shoal.jobs.compare import Compared, Comparison, compare


def show_compared(run_dir: Path, keep: bool, as_json: bool) -> None:
    """Compares the run in `run_dir` and prints it. Raises UserError as `compare`."""
    found = compare(run_dir, keep)
    if as_json:
        terms = [{**asdict(each), "ratio": each.ratio} for each in found.terms]
        print(json.dumps({**asdict(found), "terms": terms}, indent=1))
        return
    said = [escape(each) for each in (*found.said, found.learned)]
    Console(highlight=False, soft_wrap=True).print(table(found), "", *said, sep="\n")


def table(found: Comparison) -> Table:
    """Makes a table of the terms."""
    title = f"median of {found.steps} steps; what they were spent on, of {found.sampled}"
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("term", "predicted", "measured", "ratio"):
        made.add_column(heading, justify="left" if heading == "term" else "right", no_wrap=heading != "term")
    for each in found.terms:
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        measured = each.why if each.measured is None else _in_units(each, each.measured)
        made.add_row(escape(each.what), _in_units(each, each.predicted), measured, ratio)
    return made


def _in_units(each: Compared, value: float) -> str:
    return units.size(value) if each.unit == "bytes" else f"{value:.4g} {each.unit}"

"""Writes the job as it ran: `resolved.toml`, which starts the same run again, and the table on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.jobs.config import Job, Origins, describe, tables
from shoal.jobs.read import RESOLVED
from shoal.jobs.trials import Trials
from shoal.replace import replace_text
from shoal.toml import toml_key, toml_value


def to_toml(job: Job, origins: Origins) -> str:
    """Returns the job as the text of a TOML file, for `load_job`; each line ends with the value's origin."""
    lines = []
    for section, table in tables(job).items():
        if not table:  # no scheduler is asked for anything
            continue
        lines.append(f"[{section}]")
        for key, value in table.items():
            lines.append(f"{toml_key(key)} = {toml_value(value)}  # {origins.get(f'{section}.{key}', 'default')}")
        lines.append("")
    return "\n".join(lines)


def write_resolved(job: Job, origins: Origins, run_dir: Path, trials: Trials | None = None) -> None:
    """Writes `run_dir`/resolved.toml. `trials`: of plans, which it tells once none is left to try."""
    head = f"{RESOLVED}\n"
    if trials is not None and trials.next is None:
        head += "# Plans that were tried in the run:\n"
        head += "".join(f"#   {each}\n" for each in trials.candidates)
    head += "\n"
    replace_text(run_dir / "resolved.toml", head + to_toml(job, origins))  # on a full disk a resume finds the old one


def keep_resolved(
    job: Job, origins: Origins, run_dir: Path, trials: Trials | None, warn: Callable[[str], object]
) -> None:
    """Writes resolved.toml of a run that trains already: where it cannot be written, that is a warning."""
    try:
        write_resolved(job, origins, run_dir, trials)
    except OSError as error:
        warn(f"resolved.toml has the plan of before: it cannot be written ({error})")


def origin_table(job: Job, origins: Origins) -> RenderableType:
    """Makes a table of all values that are not defaults with their origins, followed by the defaults in one line."""
    table = Table(show_header=False, box=None, pad_edge=False)
    defaults = []
    for key, entry in describe(job, origins).items():
        if entry["origin"] == "default":
            defaults.append(f"{key} {toml_value(entry['value'])}")
        else:
            table.add_row(Text(key), Text(toml_value(entry["value"])), Text(entry["origin"], "cyan"))
    return Group(table, Text(f"defaults: {', '.join(defaults)}", "bright_black"))

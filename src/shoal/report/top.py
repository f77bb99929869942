"""A run in one screen of a terminal: state, progress, loss curve, ranks, last events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal import units
from shoal.plan import Plan
from shoal.toml import plan_text

from .changes import ServerRecord
from .events import Event, event_line
from .jsonl import read_standing
from .metrics import RunRecords
from .progress import Pace, progress_bar, status_line
from .rounds import round_text

LEVELS = "▁▂▃▄▅▆▇█"
UNKNOWN = "×"
"""Stands in a curve where no value is finite."""
MOST_RANKS = 8
LEAST_EVENTS = 3
COLOURS = {"trains": "green", "starting": "cyan", "ended": "bright_black", "silent": "yellow"}
_NAMED = ("rank", "pid", "memory", "CPU", "compute", "communication", "waits")


@dataclass(frozen=True)
class RankRow:
    """What is known of a rank; None for what is not.

    pid, memory, cpu: of its process now: bytes, and cores kept busy.
    compute, comm, wait: seconds of its last recorded step.
    """

    rank: int
    pid: int | None = None
    memory: int | None = None
    cpu: float | None = None
    compute: float | None = None
    comm: float | None = None
    wait: float | None = None


@dataclass(frozen=True)
class View:
    """All that a frame shows.

    state: a word, and what is known beyond it.
    goes_on: more steps are to be expected, so that there is a time left.
    damaged: lines of the record that were left out.
    """

    name: str
    state: tuple[str, str]
    goes_on: bool
    records: RunRecords
    events: Sequence[Event]
    ranks: Sequence[RankRow]
    damaged: int = 0


def sparkline(values: Sequence[float], width: int) -> str:
    """Draws `values` in at most `width` characters, each the mean of as many values; the scale is that of the means."""
    count = min(width, len(values))
    means = []
    for i in range(count):
        part = values[i * len(values) // count : (i + 1) * len(values) // count]
        finite = [each for each in part if math.isfinite(each)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [each for each in means if math.isfinite(each)]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(LEVELS) - 1
    return "".join(
        UNKNOWN if math.isnan(each) else LEVELS[round((each - low) / span * top) if span > 0 else 0] for each in means
    )


def recorded_ranks(run_dir: Path) -> dict[int, RankRow]:
    """Returns what each rank did in the last recorded step, by rank; nothing before an attempt has written it."""
    path = run_dir / "timeline.jsonl"
    spans = [each for each in read_standing(path) if {"rank", "lane", "seconds"} <= each.keys()]
    last = max((span["step"] for span in spans), default=0)
    seconds: dict[int, dict[str, float]] = {}
    for span in spans:
        if span["step"] == last:
            lanes = seconds.setdefault(span["rank"], {"compute": 0.0, "comm": 0.0, "wait": 0.0})
            if span["lane"] in lanes:
                lanes[span["lane"]] += span["seconds"]
    return {
        rank: RankRow(rank, compute=lanes["compute"], comm=lanes["comm"], wait=lanes["wait"])
        for rank, lanes in seconds.items()
    }


def frame(view: View, width: int, height: int) -> RenderableType:
    """Returns the screen for a terminal of `width` columns and `height` lines; events take the lines that are left."""
    rows: list[RenderableType] = [*_headline(view, width), *_progress(view, width)]
    if view.records.run is not None:
        rows.append(_labelled("plan", plan_text(_plan(view.records))))
    rows += map(_server, view.records.servers[-1:])
    if view.ranks:
        rows += [Text(), _ranks(view.ranks)]
    used = len(rows) + (min(len(view.ranks), MOST_RANKS) + (len(view.ranks) > MOST_RANKS) if view.ranks else 0)
    if view.damaged:
        rows.append(Text(f"{view.damaged} damaged lines of the record are left out", "yellow"))
        used += 1
    shown = view.events[-max(LEAST_EVENTS, height - used - 2) :]
    if shown:
        rows += [Text(), *map(_event, shown)]
    for row in rows:
        if isinstance(row, Text):
            row.no_wrap, row.overflow = True, "ellipsis"
    return Group(*rows)


def _headline(view: View, width: int) -> list[RenderableType]:
    """Returns the lines of the run's name and state, what is known beyond the state, and what the run is on."""
    word, detail = view.state
    room = max(width - len(word) - 2, 1)
    name = view.name if len(view.name) <= room else "…" + view.name[len(view.name) - room + 1 :]
    rows: list[RenderableType] = [Text.assemble((name, "bold"), "  ", (word, f"bold {COLOURS.get(word, 'red')}"))]
    if detail:
        rows.append(Text(detail.replace("\n", " ")))
    run = view.records.run
    if run is not None:
        ranks = f"{run.world} rank{'s' * (run.world > 1)}"
        rows.append(Text(f"{ranks} on {run.device}, {units.count(run.parameters)} parameters", "bright_black"))
    return rows


def _progress(view: View, width: int) -> list[RenderableType]:
    """Returns the lines of the step, the loss and the validation loss."""
    records = view.records
    if not records.steps:
        return [Text("no step yet", "bright_black")]
    last, total = records.steps[-1], records.run.total if records.run is not None else None
    line = status_line(last, total, _pace(records, total if view.goes_on else None), width)
    rows: list[RenderableType] = [Text(line)]
    if total:
        rows.insert(0, progress_bar(last.step, total, min(width, 72)))
    losses = [step.loss for step in records.steps]
    first, now = f"{losses[0]:.4f}", f"{losses[-1]:.4f}"
    curve = sparkline(losses, width - len(first) - len(now) - 8)
    rows.append(_labelled("loss", f"{first} {curve} {now}"))
    if records.evals:
        held_out = records.evals[-1]
        right = "" if held_out.accuracy is None else f", accuracy {held_out.accuracy:.1%}"
        rows.append(_labelled("validation", f"{held_out.loss:.4f}{right} at step {held_out.step}"))
    if records.rounds:
        rows.append(_labelled("clients", round_text(records.rounds[-1])))
    return rows


def _server(record: ServerRecord) -> Text:
    """Returns the line of a parameter server: who is there, and how stale their gradients were."""
    here = ", ".join(f"{each['client']} ({each['pushes']})" for each in record.clients if each["here"]) or "none"
    stale = ", ".join(f"{value}: {count}" for value, count in record.staleness.items()) or "none yet"
    lost = f", {record.dropped} dropped, {record.scaled} scaled" if record.dropped or record.scaled else ""
    several = len(record.servers) > 1
    name = "servers" if several else "server"
    shares = f" on {len(record.servers)} of {', '.join(f'{each:,}' for each in record.servers)} parameters" * several
    return _labelled(
        name, f"{record.policy}{shares}, clients (gradients) {here}; {record.pushes} gradients{lost}; staleness {stale}"
    )


def _pace(records: RunRecords, total: int | None) -> Pace:
    """Returns the pace of the last attempt on its way to `total` steps, or to none."""
    pace = Pace(total)
    begun = records.resumed[-1] if records.resumed else 0
    for step in records.steps:
        if step.step > begun:
            pace.add(step)
    return pace


def _plan(records: RunRecords) -> dict[str, Any]:
    """Returns the fields of the plan that are not defaults: of its last change in this attempt, or of the job at the
    step where the attempt began."""
    assert records.run is not None
    begun = records.resumed[-1] if records.resumed else 0
    changed = [each for each in records.plans if each.step > begun]
    if changed:
        return changed[-1].plan
    config = records.run.config
    given = {key: entry for key, entry in config.items() if key.startswith("plan.") and entry["origin"] != "default"}
    plan = {key.removeprefix("plan."): entry["value"] for key, entry in given.items()}
    made = [each for each in config.get("run.at", {}).get("value", ()) if each["step"] <= begun]
    if not made:
        return plan
    now = Plan.from_dict(plan)
    for change in made:
        now = now.changed(change["plan"], records.run.world)
    return now.to_dict()


def _ranks(ranks: Sequence[RankRow]) -> Table:
    """Makes a table of the ranks, of whose columns those are left out that nothing is known for."""
    cells = [_cells(row) for row in ranks[:MOST_RANKS]]
    table = Table(box=None, pad_edge=False, header_style="bright_black")
    kept = [column for column in range(len(_NAMED)) if any(row[column] for row in cells)]
    for column in kept:
        table.add_column(_NAMED[column], justify="right", no_wrap=True)
    for row in cells:
        table.add_row(*(row[column] for column in kept))
    if len(ranks) > MOST_RANKS:
        table.add_row(f"and {len(ranks) - MOST_RANKS} more")
    return table


def _cells(row: RankRow) -> list[str]:
    seconds = ("" if each is None else units.duration(each) for each in (row.compute, row.comm, row.wait))
    return [
        str(row.rank),
        "" if row.pid is None else str(row.pid),
        "" if row.memory is None else units.size(row.memory),
        "" if row.cpu is None else f"{row.cpu:.0%}",
        *seconds,
    ]


def _event(event: Event) -> Text:
    line = Text(event_line(event), "red" if event.bad else "")
    line.stylize("bright_black", 0, len(event_line(replace(event, text=""))))
    return line


def _labelled(label: str, text: str) -> Text:
    return Text.assemble((f"{label:5} ", "bright_black"), text)

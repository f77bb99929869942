"""`shoal plan --memory`: the memory of a rank by role and tier, candidate chunk sizes, and whether all of it fits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal import units
from shoal.chunks.search import Candidate
from shoal.cli.mesh_table import mesh_table, who_chooses, who_holds_what
from shoal.jobs.forecast import needed
from shoal.jobs.plan import Answer, plan_memory
from shoal.plan import nbytes
from shoal.planner import TIERS, Prediction, Row, changes
from shoal.toml import toml_fields, toml_value

NEAR = 4
"""Number of chunk sizes shown on either side of the chosen one."""


def ask(job: Path, assignments: Sequence[str], device: str | None, host: str | None) -> Answer:
    """Asks the planner for the job file `job`. `device`, `host`: free memory to assume, such as "80GiB".

    Raises UserError for an invalid job or size.
    """
    return plan_memory(
        job,
        assignments,
        None if device is None else nbytes(device, "--device", 1),
        None if host is None else nbytes(host, "--host", 1),
    )


def show(answer: Answer, as_json: bool) -> None:
    """Prints tables and a verdict, or one JSON object."""
    if as_json:
        print(json.dumps({**answer.to_dict(), "said": who_chooses(answer.auto)}, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    plan = answer.prediction.plan
    picture = [mesh_table(plan), *who_holds_what(plan), ""] if plan.size > 1 else []
    console.print(_title(answer), "", *picture, role_table(answer.prediction), sep="\n")
    sizes = answer.prediction.sizes
    if sizes is not None:
        console.print("", size_table(sizes.candidates, answer.prediction.chunk_bytes), sep="\n")
    if answer.layers.layers:
        console.print("", str(answer.layers), sep="\n")
    console.print("", *verdict(answer), *who_chooses(answer.auto), sep="\n")
    for step, later in answer.later:
        text = Text(f"after step {step}: {toml_fields(later.plan.to_dict()) or 'replicated'}")
        console.print("", text, "", role_table(later), "", *fits(later), sep="\n")


def _title(answer: Answer) -> Text:
    job, plan = answer.settled.job, answer.prediction.plan
    precision = job.train.precision if isinstance(job.train.precision, str) else toml_value(job.train.precision)
    return Text(
        f"{job.model['name']} of {units.count(answer.parameters)} parameters in {precision}, microbatch "
        f"{answer.microbatch}, {plan.size} rank(s), {toml_fields(plan.to_dict()) or 'replicated'}"
    )


def role_table(prediction: Prediction) -> Table:
    """Makes a table with one row per role and one column per tier in use."""
    rows = prediction.need.rows
    tiers = [tier for tier in TIERS if any(row.tier == tier for row in rows)]
    table = Table(
        title="memory of the rank that needs most" if prediction.plan.pipelined else "memory of a rank",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("role", no_wrap=True)
    for tier in tiers:
        table.add_column(tier, justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    for row in rows:
        table.add_row(row.role, *(units.size(row.nbytes) if row.tier == tier else "" for tier in tiers), _when(row))
    table.add_row("[bold]most at a time", *(units.size(prediction.need.total(tier)) for tier in tiers), "")
    return table


def _when(row: Row) -> str:
    phase = {"always": "", "backward": "until backward ends", "update": "during the update"}[row.phase]
    return f"once for {row.sharers} ranks" if row.sharers > 1 else phase


def size_table(candidates: Sequence[Candidate], chosen: int) -> Table:
    """Makes a table of the candidate chunk sizes around the `chosen` one (bytes)."""
    table = Table(title="chunk sizes (gradient)", title_justify="left", box=None, pad_edge=False)
    for heading in ("chunk size", "chunks", "waste", "in use at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    near = sorted(candidates, key=lambda each: abs(each.chunk_bytes - chosen))[: 2 * NEAR + 1]
    for each in sorted(near, key=lambda each: each.chunk_bytes):
        mark = "<- taken" if each.chunk_bytes == chosen else ""
        table.add_row(
            units.size(each.chunk_bytes), str(each.chunks), f"{each.waste:.2%}", units.size(each.in_use), mark
        )
    return table


def verdict(answer: Answer) -> Iterator[str]:
    """Yields the last lines: what fits and by how much, plans that would fit, and the largest model that does."""
    yield from fits(answer.prediction)
    if answer.stages:
        yield f"by place along pp a rank needs {', '.join(units.size(needed(each)) for each in answer.stages)}"
    for other in answer.instead:
        change = escape(toml_fields(changes(answer.prediction.plan, other.plan)))
        if other.free >= 0:
            yield f"it would fit with {change}, {units.size(other.free)} left"
        else:
            missing = f"{units.size(-other.free)} are missing"
            yield f"no plan of zero, memory and recompute fits; {change} comes nearest, {missing}"
    largest = answer.largest
    if largest is not None and largest.table is not None:
        settings = escape(
            toml_fields({key: value for key, value in largest.table.items() if key not in ("name", "preset")})
        )
        yield f"largest that fits ({largest.rule}): {units.count(largest.parameters)} parameters, {settings}"
    elif largest is not None:
        yield f"no model of this family fits ({largest.rule})"


def fits(prediction: Prediction) -> Iterator[str]:
    """Yields a line for each memory: whether what is needed there fits, and by how much; and the least budget."""
    for fit in prediction.fits:
        colour, word = ("green", "fits") if fit.free >= 0 else ("red", "does not fit")
        rest = f"{units.size(fit.free)} are left" if fit.free >= 0 else f"{units.size(-fit.free)} are missing"
        amount = f"{units.size(fit.needed)} of {units.size(fit.available)}"
        yield f"[{colour}]{word}[/]  {escape(fit.memory)}: {amount}, {rest}"
    smallest = prediction.smallest
    if smallest is not None:
        yield f"plan.memory.device may be as small as {units.size(smallest)} ({smallest} bytes)"

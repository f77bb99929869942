"""What the planner found for each stage and each replica: blocks that are computed again, and shares of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.table import Table

from shoal import units
from shoal.module.chosen_blocks import as_ranges
from shoal.planner.task import Estimate

WAYS = {"full": "all computed again", "selective": "but products and attention", "none": "kept"}


def stage_table(estimate: Estimate) -> Table | None:
    """Makes a table of the blocks of each stage by how backward treats them, stages that are alike in one row; None
    where everything of all is kept."""
    if all(set(own) <= {"none"} for own in estimate.again):
        return None
    title = "blocks of a stage, by what backward computes again"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("stage", "blocks", *WAYS.values()):
        table.add_column(heading, justify="left" if heading == "stage" else "right", no_wrap=True)
    for own, alike in groupby(
        range(len(estimate.again)), key=lambda stage: tuple(sorted(estimate.again[stage].items()))
    ):
        numbers = dict(own)
        row = [str(numbers.get(way, 0)) for way in WAYS]
        table.add_row(as_ranges(list(alike)), str(sum(numbers.values())), *row)
    return table


def shares_said(estimate: Estimate) -> Iterator[str]:
    """Yields what replicas on devices of different speed have of a batch."""
    if not (shares := estimate.choice.shares):
        return
    runs = [(share, len(list(alike))) for share, alike in groupby(shares)]
    whole = sum(shares)
    said = ", then ".join(f"{number} with {share / whole:.3g} each" for share, number in runs)
    yield f"shares of a batch: {units.count(len(shares))} replicas, {said}"

"""The table of layers in the planner's answer: how each is cut along tp, what that saves, and why one stays whole."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from shoal.planner.layers import Layers, Together


def layer_lines(layers: Layers, placements: dict[str, str]) -> Iterator[str | Table]:
    """Yields the table, and what is said below it. `placements`: those of the plan."""
    table = Table(title=f"layers along tp = {layers.ranks}", title_justify="left", box=None, pad_edge=False)
    for heading, where in (("layer", "left"), ("cut as", "left"), ("cutting saves", "right"), ("", "left")):
        once = heading in ("cut as", "cutting saves")  # names are long, and may take several lines
        table.add_column(heading, justify=where, no_wrap=once, overflow="fold")  # type: ignore[arg-type]
    for group in layers.groups:
        for place, (name, kind) in enumerate(zip(group.layers, group.kinds, strict=True)):
            shown = "whole" if placements.get(name) == "whole" else kind
            said = ("", "") if place else (f"{group.saved * 1e3:.3g} ms", why(group, placements))
            table.add_row(escape(name), shown, *said)
    yield table
    cut, chosen, least = (f"{1e3 * each:.4g} ms" for each in (layers.cut, layers.chosen, layers.least))
    yield (
        f"a microbatch of what was traced takes {cut} where all of these are cut, {chosen} with those whole that are "
        f"better so, {least} at least, with samples and tokens cut too"
    )


def why(group: Together, placements: dict[str, str]) -> str:
    """Says why a group is as it is."""
    if group.pinned:
        return "pinned"
    if any(placements.get(name) == "whole" for name in group.layers):
        return "sending takes longer"
    return "but whole is no faster or takes more memory" if group.saved < 0 else ""

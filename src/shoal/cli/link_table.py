"""The measured links as a table: time and rate of all-reduces by size, one column per transport."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from shoal import units
from shoal.comm import Link

BAR = 12
"""Width of the longest bar in characters."""


def link_table(links: Sequence[Link]) -> Table:
    """Makes a table with one row per size; bars show rates on a logarithmic scale, the same for all transports."""
    rates = [nbytes / seconds for link in links for nbytes, seconds in link.rows if seconds > 0]
    least, most = (min(rates), max(rates)) if rates else (1.0, 1.0)
    table = Table(title="all-reduce: time and rate, bars logarithmic", title_justify="left", box=None, pad_edge=False)
    table.add_column("tensor", justify="right")
    for link in links:
        table.add_column(f"{link.ranks} ranks, {link.carrier}", no_wrap=True)
    for nbytes in sorted({nbytes for link in links for nbytes, _ in link.rows}):
        cells = (_cell(nbytes, dict(link.rows).get(nbytes), least, most) for link in links)
        table.add_row(units.size(nbytes), *cells)
    return table


def _cell(nbytes: int, seconds: float | None, least: float, most: float) -> str:
    if not seconds:
        return "-"
    rate = nbytes / seconds
    share = math.log(rate / least) / math.log(most / least) if most > least else 1.0
    return f"{units.duration(seconds):>9} {units.size(rate):>9}/s {'█' * (1 + round(share * (BAR - 1)))}"

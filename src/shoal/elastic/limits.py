"""How many nodes a job has, as who starts it says."""

from __future__ import annotations

from shoal.elastic.events import MOST_NODES
from shoal.errors import UserError


def node_limits(text: str) -> tuple[int, int]:
    """Returns the least and the largest number of nodes that "2", "1:4" or "2:" names. Raises UserError for others."""
    low, colon, high = text.partition(":")
    try:
        minimum = int(low)
        maximum = (int(high) if high else MOST_NODES) if colon else minimum
    except ValueError:
        minimum = maximum = 0
    if not 1 <= minimum <= maximum <= MOST_NODES:
        raise UserError(f"--nodes {text}: give numbers of nodes, the least and the largest, like 2, 1:4 or 2:")
    return minimum, maximum

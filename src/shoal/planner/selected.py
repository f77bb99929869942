"""What `selective` recompute keeps of a block, as plan.recompute's `save` says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from shoal.module.selective import SAVE, selects
from shoal.plan import option_parameters
from shoal.planner.degrees import Spread
from shoal.planner.profile import PartProfile


def saved_names(pins: Mapping[str, Any]) -> tuple[str, ...]:
    """The operations whose results are kept, by name, where `pins` are fields of a plan that are given."""
    given = pins.get("recompute", "none")
    return tuple(option_parameters(given).get("save", SAVE)) if selects(given) else SAVE


def results_kept(parts: Iterable[PartProfile], spread: Spread, saved: Collection[str]) -> float:
    """Bytes of a row that blocks among `parts` keep of what the operations `saved` give."""
    found = 0.0
    for part in parts:
        of = {"matmul": part.results, "attention": part.attended, "convolution": part.convolved}
        found += sum(each.on(spread) for name, each in of.items() if name in saved and part.is_block)
    return found

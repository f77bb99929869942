"""Rounds of federated training, for a section of the page: sums over all of them, and charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes

from .drawing import FAINT, FIRST, NARROW, Chart, draw_chart
from .rounds import RoundRecord

BARS = 20
WORDS = {
    "asked": "asked",
    "results": "results",
    "went away": "dropped",
    "too late": "late",
    "cut short": "partial",
    "not finite": "broken",
}
"""What the page calls the numbers of a record."""


@dataclass(frozen=True)
class Federation:
    """The section of the report: sums over all rounds, and charts.

    clients: numbers of clients by what became of them.

    stale: results by how many updates old they were, where any was older than 0. evaluated: the last round in which
    accuracies were measured, with those.
    """

    rounds: int
    clients: dict[str, int]
    simulated: float | None
    charts: list[Chart]
    evaluated: RoundRecord | None


def federation(rounds: Sequence[RoundRecord]) -> Federation | None:
    """Sums up the rounds; None for a run without any."""
    if not rounds:
        return None
    evaluated = [each for each in rounds if any(not math.isnan(value) for value in each.accuracies or [])]
    times = [each.simulated for each in rounds if each.simulated is not None]
    charts = [_staleness(rounds), *_accuracies(evaluated)]
    counts = {word: sum(getattr(each, name) for each in rounds) for word, name in WORDS.items()}
    counts["rounds without an update"] = sum(not each.applied for each in rounds)
    return Federation(
        len(rounds),
        {word: count for word, count in counts.items() if count or word in ("asked", "results")},
        simulated=sum(times) if times else None,
        charts=[chart for chart in charts if chart is not None],
        evaluated=evaluated[-1] if evaluated else None,
    )


def _staleness(rounds: Sequence[RoundRecord]) -> Chart | None:
    most = max(len(each.stale) for each in rounds)
    if most < 2:
        return None
    counts = [sum(each.stale[age] for each in rounds if age < len(each.stale)) for age in range(most)]

    def draw(axes: Axes) -> None:
        axes.bar(range(most), counts, color=FIRST)

    label = ", ".join(f"{count} results {age} updates old" for age, count in enumerate(counts))
    return draw_chart("Results by age, updates", label, draw, height=190, wide=NARROW, first_tick="{:g}")


def _accuracies(evaluated: Sequence[RoundRecord]) -> list[Chart]:
    """Draws the lowest, the median and the highest accuracy of a client over the rounds, and how they lie at last."""
    if not evaluated:
        return []
    known = [[value for value in each.accuracies or [] if not math.isnan(value)] for each in evaluated]
    steps = [float(each.step) for each in evaluated]
    curves = {
        name: [of(values) for values in known] for name, of in (("lowest", min), ("median", median), ("highest", max))
    }

    def over_rounds(axes: Axes) -> None:
        axes.fill_between(steps, curves["lowest"], curves["highest"], color=FAINT, linewidth=0)
        axes.plot(steps, curves["median"], color=FIRST, linewidth=1.5)
        axes.set_ylim(0, 1.02)

    def at_last(axes: Axes) -> None:
        axes.hist(known[-1], bins=BARS, range=(0, 1), color=FIRST)

    last = f"{min(known[-1]):.1%} to {max(known[-1]):.1%}, median {median(known[-1]):.1%}"
    title = "Accuracy by client: lowest, median, highest"
    return [
        draw_chart(title, f"Accuracy by client at the end: {last}", over_rounds, height=190, wide=NARROW),
        draw_chart(
            "Clients by accuracy at the end", f"{len(known[-1])} clients: {last}", at_last, height=190, wide=NARROW
        ),
    ]

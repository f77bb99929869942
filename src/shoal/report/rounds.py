"""The record of a round of federated training, and what `shoal top` says of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CLIENTS = 1000
"""The most clients whose accuracy is in a record, evenly spread."""


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What came of a round; `step` is its number. Numbers of clients:

    asked, results: that were asked, and whose result counts. dropped: that went away. late: that came after the
        deadline, or with a result too old. partial: that were cut short by the deadline. broken: whose weights were not
        finite.
    applied: whether the global model was updated.
    stale: how many results were 0, 1, 2, ... updates old.
    simulated: seconds of simulated time, in local steps of a client of speed 1; None where clients are real.
    accuracies: of the global model on what each client holds out, where it was evaluated; NaN for one without samples.
    """

    step: int
    asked: int
    results: int
    dropped: int
    late: int
    partial: int
    broken: int
    applied: bool
    stale: list[int]
    simulated: float | None = None
    accuracies: list[float] | None = None


def spread_out(values: Sequence[float]) -> list[float]:
    """Returns at most CLIENTS of `values`, evenly spread."""
    count = min(CLIENTS, len(values))
    return [float(values[index * len(values) // count]) for index in range(count)]


def round_text(record: RoundRecord) -> str:
    """Formats the clients of a round, for a line of a terminal."""
    others = {
        "gone": record.dropped,
        "late": record.late,
        "cut short": record.partial,
        "not finite": record.broken,
    }
    said = ", ".join(f"{count} {word}" for word, count in others.items() if count)
    known = [each for each in record.accuracies or [] if not math.isnan(each)]
    best = f", accuracy {min(known):.1%} to {max(known):.1%}" if known else ""
    left = "" if record.applied else ", too few for an update"
    return f"{record.results} of {record.asked}{f', {said}' if said else ''}{left}{best}"

"""Whether a quantity of long-lived processes grows: a straight line through samples, with a level of its own for each
process in each situation, since a supervisor of three nodes has more connections than one of two."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A value at `seconds`; `level`: process and situation, whose samples are compared with each other alone."""

    level: Hashable
    seconds: float
    value: float


@dataclass(frozen=True)
class Growth:
    """What samples say.

    samples, levels: how many there are; span: seconds of the longest level
    mean: of the values; per_hour: the slope; grown: what that is over the longest span
    tolerance: what `grown` may be
    """

    samples: int
    levels: int
    span: float
    mean: float
    per_hour: float
    grown: float
    tolerance: float

    @property
    def is_none(self) -> bool:
        return self.grown <= self.tolerance


def growth(samples: Sequence[Sample], tolerance: float, share: float = 0.0) -> Growth:
    """Fits one slope to all samples by least squares. `tolerance`: what may be added over the longest span of a level,
    or `share` of the mean where that is more. Levels of a single moment say nothing."""
    by_level = defaultdict[Hashable, list[Sample]](list)
    for sample in samples:
        by_level[sample.level].append(sample)
    product = square = span = 0.0
    for level in by_level.values():
        middle = sum(each.seconds for each in level) / len(level)
        mean = sum(each.value for each in level) / len(level)
        product += sum((each.seconds - middle) * (each.value - mean) for each in level)
        square += sum((each.seconds - middle) ** 2 for each in level)
        span = max(span, max(each.seconds for each in level) - min(each.seconds for each in level))
    slope = product / square if square else 0.0
    overall = sum(each.value for each in samples) / len(samples) if samples else 0.0
    return Growth(
        len(samples), len(by_level), span, overall, 3600 * slope, slope * span, max(tolerance, share * overall)
    )

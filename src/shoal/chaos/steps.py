"""How fast the steps of a run follow each other, so that it is not over before its faults have happened."""

from __future__ import annotations

import math
from pathlib import Path

from shoal.chaos.faults import LASTING, Fault, Schedule
from shoal.replace import replace_text

_SECONDS_A_FAULT = 6.0
"""Seconds of training between two faults, in which a node can come back: steps are slowed down to that."""
_MARGIN = 5.0
"""Seconds of training after a fault was due. Then steps wait for it (see jobs/drill.py)."""
_SHARE = 1 / 4
"""The share of the steps left then that wait for nothing, at most."""
_LASTING = 1.5
"""So many times as long as a fault lasts the steps that are left are to take."""


class Steps:
    """The `total` steps of the run whose ranks look into the folder `drill`, with `pace` seconds before each, which by
    itself takes `usual` seconds."""

    def __init__(self, drill: Path, total: int, pace: float, usual: float) -> None:
        self.drill, self._file, self._total, self._pace = drill, drill / "pace", total, pace
        self._margin = _MARGIN / max(pace + usual, 1e-9)

    def until(self, fault: Fault) -> None:
        """Lets the run go on at its pace until shortly after a fault is due."""
        self._write(self._pace, fault.step + min(self._margin, _SHARE * (self._total - fault.step)))

    def during(self, fault: Fault, step: int) -> None:
        """Lets the run go on from `step` while a fault lasts, so that it is over before the steps are."""
        self._write(max(self._pace, _LASTING * fault.seconds / max(1, self._total - step)), math.inf)

    def to_the_end(self) -> None:
        """Slows the run down no more."""
        self._file.unlink(missing_ok=True)

    def _write(self, pace: float, last: float) -> None:
        replace_text(self._file, f"{pace} {last}")


def chosen_pace(total: int, usual: float, schedule: Schedule) -> float:
    """Returns the seconds to wait before each step, so that there is time between two faults.

    total: how many there are. usual: seconds that one takes by itself.
    """
    lasting = sum(fault.seconds for fault in schedule.faults if fault.kind in LASTING)
    return max(0.0, (_SECONDS_A_FAULT * (len(schedule.faults) + 1) + lasting) / total - usual)

"""Whether a run that had faults has lost anything, held against the same run without them."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.chaos.nodes import MARK, Cluster
from shoal.jobs.drill import Dealt
from shoal.launch.scratch import sweep
from shoal.report.metrics import StepRecord

_SHARED = Path("/dev/shm")
_PATIENCE = 5.0
"""Seconds in which processes of a run that is over have to end, and its files to go."""


@dataclass(frozen=True)
class Check:
    """A question, whether the answer is good, and the answer."""

    name: str
    passed: bool
    text: str


def check_losses(found: Sequence[StepRecord], reference: Sequence[StepRecord], tolerance: float) -> list[Check]:
    """Compares the committed steps and their losses with those of the reference. tolerance: relative."""
    steps, wanted = [each.step for each in found], [each.step for each in reference]
    same = steps == wanted
    checks = [Check("steps", same, f"{len(steps)} of {len(wanted)}, each once" if same else _unequal(steps, wanted))]
    pairs = [(mine.loss, theirs.loss) for mine, theirs in zip(found, reference, strict=False)]
    equal = sum(mine == theirs for mine, theirs in pairs)
    worst = max((_difference(mine, theirs) for mine, theirs in pairs), default=0.0)
    if equal == len(pairs):
        return [*checks, Check("losses", bool(pairs), "equal to the reference, bit by bit")]
    text = f"within {worst:.1e} of the reference (allowed: {tolerance:.0e}), {equal} of {len(pairs)} bit by bit"
    return [*checks, Check("losses", worst <= tolerance, text)]


def _difference(mine: float, theirs: float) -> float:
    """Returns the relative difference of two losses; infinity where one of them is not finite."""
    found = abs(mine - theirs) / max(abs(theirs), 1e-12)
    return found if math.isfinite(found) else math.inf


def _unequal(steps: Sequence[int], wanted: Sequence[int]) -> str:
    missing, more = sorted(set(wanted) - set(steps)), sorted(set(steps) - set(wanted))
    return f"{len(missing)} missing {missing[:5]}, {len(more)} too many {more[:5]}"


def read_dealt(folder: Path) -> list[Dealt]:
    """Reads what ranks told of their samples; a line that a killed process has not completed is left out."""
    found = []
    for path in sorted(folder.glob("samples-*")):
        for line in path.read_text().splitlines():
            with suppress(ValueError, TypeError):
                found.append(Dealt(**json.loads(line)))
    return found


def check_samples(dealt: Sequence[Dealt], steps: int, reference: Mapping[int, Sequence[int]]) -> Check:
    """Checks that replicas shared out each step's batch among them, every sample once, when it was committed: by the
    last generation that began the step.

    steps: how many were committed. reference: the batch of each step in the undisturbed run.
    """
    by_step: dict[int, list[Dealt]] = defaultdict(list)
    for each in dealt:
        by_step[each.step].append(each)
    wrong = []
    for step in range(steps):
        newest = max((each.generation for each in by_step[step]), default=0)
        shares: dict[int, list[int]] = {}
        agree = True
        for each in by_step[step]:
            if each.generation == newest:
                agree &= shares.setdefault(each.replica, each.ids) == each.ids  # ranks that share a model's replica
        ids = sorted(number for share in shares.values() for number in share)
        if not agree or ids != sorted(reference.get(step, ())):
            wrong.append(step + 1)
    samples = sum(len(ids) for ids in reference.values())
    if wrong:
        return Check("samples", False, f"{len(wrong)} step(s) with other samples than the reference: {wrong[:5]}")
    return Check("samples", True, f"each of {samples:,} committed exactly once")


def batches_of(dealt: Sequence[Dealt]) -> dict[int, list[int]]:
    """Returns the samples of each step's batch."""
    return {each.step: each.batch for each in dealt}


def check_processes(cluster: Cluster) -> Check:
    """Checks that no process of a run that is over lives."""
    deadline = time.monotonic() + _PATIENCE
    while (left := cluster.marked()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return Check("processes", not left, f"left: {[each.pid for each in left]}" if left else "none left")


def check_codes(cluster: Cluster) -> Check:
    """Checks how the supervisors have ended: by 0, unless they were told to leave or were killed."""
    codes = [node.process.poll() for node in cluster.nodes]
    bad = [code for code in codes if code not in (0, 143, -9)]
    good = 0 in codes and not bad
    return Check("exit codes", good, ", ".join(map(str, codes)) + " of the nodes, in the order in which they came")


class Files:
    """The files in shared memory when it is made."""

    def __init__(self) -> None:
        self._before = _shared()

    def check(self, cluster: Cluster) -> Check:
        """Checks that a run that is over has left nothing in shared memory and in its folder of temporary files, but
        for what the next start sweeps away. What others make meanwhile and remove in time is not counted."""
        deadline = time.monotonic() + _PATIENCE
        while (left := self._left(cluster)) and time.monotonic() < deadline:
            time.sleep(0.5)
        return Check(
            "files", not left, f"left: {left[:5]}" if left else "nothing left in /dev/shm and in temporary files"
        )

    def _left(self, cluster: Cluster) -> list[str]:
        sweep(cluster.temporary)
        new = _shared() - self._before  # before it is asked who holds them: others go on making some
        left = [each for each in sorted(new - _held_by_others(cluster.mark)) if Path(each).exists()]
        return left + [path.name for path in cluster.temporary.iterdir()]


def _shared() -> set[str]:
    """All but multiprocessing's semaphores, which its tracker removes once the process has ended that made them, of
    whatever program: until then nobody need have them open."""
    found = [path for path in _SHARED.rglob("*") if path.is_file()] if _SHARED.is_dir() else []
    return {str(path) for path in found if not path.name.startswith("sem.mp-")}


def _held_by_others(mark: str) -> set[str]:
    held: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) != mark:
                held |= {mapping.path for mapping in process.memory_maps()}
                held |= {file.path for file in process.open_files()}
    return held

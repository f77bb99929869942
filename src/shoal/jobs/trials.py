"""Which plans a job with `plan.measure` tries, what was measured of them, and how a run that goes on knows it.

The record is `trials.json` in the run's directory, kept by rank 0. Trials hold for the job, the number of ranks and the
kind of machine of which they speak. Where nodes come and go the record has those of other numbers too: a rank that a
plan ends is missed for a generation of one rank less, and the next one has to know of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.jobs.config import Job, Origins, tables
from shoal.plan import Plan
from shoal.replace import replace_text
from shoal.toml import plan_text

FILE = "trials.json"
DEATHS = 2
"""So many ends of a process under a candidate pass it over."""
KEPT = 16
"""Of so many jobs and numbers of ranks the trials are kept."""


@dataclass(frozen=True)
class Candidate:
    """A plan, as the fields that are not defaults. `predicted`, `seconds`: of a step, as the planner says and as it was
    measured, None before. `why` it was passed over. `deaths`: how often the run has ended while it was tried."""

    plan: Mapping[str, Any]
    predicted: float
    seconds: float | None = None
    why: str = ""
    deaths: int = 0

    def __str__(self) -> str:
        plan = plan_text(self.plan)
        if self.seconds is None:
            return f"{plan}: {f'passed over: {self.why}' if self.why else 'not tried'}"
        return f"{plan}: {self.seconds:.4g} s a step, {self.predicted:.4g} s predicted"

    @property
    def is_open(self) -> bool:
        """Whether it is still to be tried."""
        return self.seconds is None and not self.why


@dataclass(frozen=True)
class Trials:
    """All candidates, the one predicted to be the fastest first. `now`: the one under trial, None between two. `ended`:
    by a hand that changed the plan. `machine`: the kind on which they are tried, "" where that is not known."""

    key: str
    microbatch: int | None
    candidates: tuple[Candidate, ...]
    now: int | None = None
    ended: bool = False
    machine: str = ""

    @property
    def next(self) -> int | None:
        """The candidate to try next, those under which the run has ended last; None when all were tried."""
        if self.ended:
            return None
        left = [index for index, each in enumerate(self.candidates) if each.is_open]
        return min(left, key=lambda index: self.candidates[index].deaths, default=None)

    @property
    def fastest(self) -> int:
        """The candidate whose steps were the shortest; before any was measured, the first that was not passed over."""
        measured = [index for index, each in enumerate(self.candidates) if each.seconds is not None]
        if measured:
            return min(measured, key=lambda index: self.candidates[index].seconds or 0.0)
        return next((index for index, each in enumerate(self.candidates) if not each.why), 0)

    @property
    def plan(self) -> Plan:
        """The plan to begin or go on with: of the next candidate, or of the fastest."""
        index = self.next
        return Plan.from_dict(dict(self.candidates[self.fastest if index is None else index].plan))

    @property
    def why(self) -> str:
        """Why `plan` is what it is, in words."""
        if self.next is not None:
            return "it is tried"
        if any(each.seconds is not None for each in self.candidates):
            return "the fastest of those that were tried"
        return "predicted to be the fastest; all that were to be tried were passed over"

    def begun(self, index: int) -> Trials:
        return replace(self, now=index)

    def with_result(self, index: int, seconds: float | None, why: str = "") -> Trials:
        """The trials when a candidate was measured, or passed over."""
        one = replace(self.candidates[index], seconds=seconds, why=why)
        candidates = (*self.candidates[:index], one, *self.candidates[index + 1 :])
        return replace(self, candidates=candidates, now=None)

    def paused(self) -> Trials:
        """The trials of a run that ends in good order: the one under way will begin again."""
        return replace(self, now=None)

    def after_the_end(self, failed: bool) -> Trials:
        """The trials after what tried them has ended. `failed`: a process did so by itself, which counts as a death of
        the candidate that was tried, unlike the loss of a node."""
        if self.now is None or not failed:
            return self.paused()
        one = self.candidates[self.now]
        one = replace(one, deaths=one.deaths + 1)
        if one.deaths >= DEATHS:
            one = replace(one, why=f"the run has ended {one.deaths} times while it was tried")
        candidates = (*self.candidates[: self.now], one, *self.candidates[self.now + 1 :])
        return replace(self, candidates=candidates, now=None)

    def replaces(self, before: Trials) -> bool:
        """Whether these are later ones of the same question on the same kind of machine."""
        return self.key == before.key and before.machine in ("", self.machine)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, said: Mapping[str, Any]) -> Trials:
        candidates = tuple(Candidate(**each) for each in said["candidates"])
        return cls(said["key"], said["microbatch"], candidates, said["now"], said["ended"], said.get("machine", ""))


def key_of(job: Job, origins: Origins, pins: Mapping[str, Any], ranks: int) -> str:
    """Tells apart what is measured: model, data, mathematics but for the microbatch and what follows from the number of
    steps, what is given of the plan, ranks."""
    known = {name: dict(table) for name, table in tables(job).items() if name in ("model", "data", "train")}
    chosen = [key for key in known["train"] if origins.get(f"train.{key}") == "planner"]
    for key in ("steps", "epochs", "seconds", "microbatch", *chosen):
        known["train"].pop(key, None)
    if origins.get("train.microbatch") in ("file", "cli"):
        known["train"]["microbatch"] = job.train.microbatch
    content = json.dumps([known, dict(pins), job.auto.measure, job.auto.allow, ranks], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def of_candidates(key: str, microbatch: int | None, plans: Sequence[tuple[Plan, float]]) -> Trials:
    """Trials of plans, each with the seconds that are predicted of a step."""
    return Trials(key, microbatch, tuple(Candidate(plan.to_dict(), seconds) for plan, seconds in plans))


def read(run_dir: Path, key: str | None = None, machine: str | None = None) -> Trials | None:
    """What is kept of a run's trials: the last ones, or those of `key`, or that may be of such a `machine`. None where
    there are none, or they cannot be read."""
    known = (each for each in _all(run_dir) if machine is None or each.machine in ("", machine))
    return next((each for each in known if key in (None, each.key)), None)


def write(run_dir: Path, trials: Trials) -> None:
    """Keeps them, and those of other keys and machines beside them. Raises OSError where they cannot be written."""
    run_dir.mkdir(parents=True, exist_ok=True)
    others = [each.to_wire() for each in _all(run_dir) if not trials.replaces(each)]
    replace_text(run_dir / FILE, json.dumps({**trials.to_wire(), "others": others[: KEPT - 1]}, indent=1))


def end_trial(run_dir: Path, failed: bool) -> None:
    """Keeps how the last generation of a run has ended for the plan that it tried, of which a generation of another
    number of ranks may be the next to know. `failed`: see Trials.after_the_end."""
    last = read(run_dir)
    if last is not None and last.now is not None:
        with suppress(OSError):  # who goes on with these trials counts it by itself
            write(run_dir, last.after_the_end(failed))


def _all(run_dir: Path) -> list[Trials]:
    """All trials that are kept, the last ones first."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        said = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
        return [Trials.from_wire(each) for each in (said, *said.get("others", ()))]
    return []

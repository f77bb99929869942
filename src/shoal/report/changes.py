"""Records of texts, of what a step was spent on, of what changes beside the weights, of checkpoints, of problems, and
of an end. See metrics.py."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """A text by the model at `step`: the continuation of `prompt`, without the prompt."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class MovesRecord:
    """The bytes that rank 0 moved between tiers in a step, for the first step of each plan and for recorded steps.

    planned, moved: bytes by what moves; planned is None without a plan for this step.
    otherwise: bytes that would have been brought to the device under other rules, by rule.
    """

    step: int
    planned: dict[str, int | None]
    moved: dict[str, int]
    otherwise: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """A change of the plan after `step`. `plan`: its fields that are not defaults; `seconds` that the change took."""

    step: int
    plan: dict[str, Any]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TriedRecord:
    """A plan that was tried in the run, until after `step`. `plan`: its fields that are not defaults. `predicted`,
    `seconds`: of a step; None, with the reason `why`, where it was passed over."""

    step: int
    plan: dict[str, Any]
    predicted: float
    seconds: float | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class TermsRecord:
    """What a sampled step was spent on (see terms.py).

    world: number of ranks; `hosts`: names of theirs; `rank`: the one that works longest, of whom the next three speak.
    seconds: of the step. terms: seconds of each term, which make them up. sent: bytes handed to collectives, by what
        ranks divide.
    means: seconds of each term, over all ranks.
    calls: of collectives, by `operation`, `what` ranks divide, number of `ranks`, whether they are `across` hosts, and
        bytes (`payload`): how many `calls` a rank makes, and the `seconds` of one where all have come.
    """

    step: int
    world: int
    hosts: list[str]
    rank: int
    seconds: float
    terms: dict[str, float]
    sent: dict[str, int]
    means: dict[str, float]
    calls: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class MembershipRecord:
    """A generation of a job whose nodes come and go, from `step` on (see docs/elastic.md).

    generation: its number; `nodes`, `world`: the numbers of its nodes and ranks.
    why: it was formed. `lost`: committed steps that are trained again, from the checkpoint of `step`.
    events: what has happened to the members since the generation before was formed.
    """

    step: int
    generation: int
    nodes: int
    world: int
    why: str
    lost: int
    events: list[str]


def standing(generations: Iterable[MembershipRecord]) -> list[MembershipRecord]:
    """Returns the generations before whose beginning no later one has gone back."""
    found = list[MembershipRecord]()
    for each in generations:
        found = [*(before for before in found if before.step <= each.step), each]
    return found


@dataclass(frozen=True, kw_only=True)
class ServerRecord:
    """What a parameter server has seen up to `step`, an update of its weights (see docs/server.md).

    policy: as server.policy names it.
    clients: of each its number `client`, its `pushes` in this attempt, and whether it is `here`.
    pushes, dropped, scaled: gradients taken, dropped, and given a smaller learning rate because of their lag.
    staleness, lags: how often each was seen, by its number as a text.
    servers: how many parameters each server has.
    """

    step: int
    policy: str
    clients: list[dict[str, Any]]
    pushes: int
    dropped: int
    scaled: int
    staleness: dict[str, int]
    lags: dict[str, int]
    servers: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """A completed checkpoint. `path` is relative to the run directory; `seconds`: how long training waited for it."""

    step: int
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WarningRecord:
    """A problem that did not stop the training."""

    message: str


@dataclass(frozen=True, kw_only=True)
class EndRecord:
    """The end of an attempt, unless it was killed: `reason` as a sentence, `seconds` since its beginning."""

    reason: str
    seconds: float

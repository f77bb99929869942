"""The plan of a model that cannot be traced: data parallelism, which takes any way through a model; and what can be
said of another one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shoal.plan import Plan
from shoal.planner.degrees import FIELDS, PINS, Spread, traced_as
from shoal.planner.prepare import Subject, Untraced, blank, in_one_line, prepared
from shoal.toml import plan_text


def without_trace(pins: Mapping[str, Any], ranks: int, error: Untraced) -> tuple[Plan, str]:
    """Returns data parallelism over all `ranks` with the fields that `pins` give, and why it is that, in words.

    error: what tracing the model raised.

    Raises Untraced where `pins` divide the model, or have another number of replicas: what that takes, and whether it
    can be, a trace would say.
    """
    copies = Spread(copies=ranks)
    degrees = {field: getattr(copies, what) for field, what in PINS.items()}
    for field, degree in degrees.items():
        if (given := pins.get(field, degree)) != degree:
            raise Untraced(
                error.reason,
                f"Without that only {plan_text(copies.plan().to_dict())} can be answered for {ranks} ranks, and "
                f"{field} = {given} is pinned: leave it out, or give the whole plan instead of asking for one, which "
                "the engine takes as it is, or says why not",
            ) from error
    return Plan(**{**pins, **degrees}), (
        f"{error.reason}. Memory and time are not predicted: pin zero = 3 or memory where the state does not fit; for "
        "pp, tp, cp or ep give the whole plan instead of asking for one, where the model can be divided so"
    )


def check_divided(pins: Mapping[str, Any], subject: Subject) -> None:
    """Raises UserError, as an engine would, where the model of `subject`, which cannot be traced, cannot be divided as
    `pins` say whatever it computes: to give the whole plan would be no remedy."""
    for what in ("parts", "tokens", "experts"):
        if (ranks := pins.get(FIELDS[what], 1)) == 1:
            continue
        way = "ring" if what == "tokens" and pins.get("context") == "ring" else what
        own = replace(subject, plan=traced_as(way, ranks, pins.get("placements")), rank=0)
        with suppress(Untraced), in_one_line(), prepared(blank(own.factory), own):
            pass

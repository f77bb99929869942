"""From a model and its training to a task: the trace, the optimizer's bytes, and what degrees have to divide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from shoal.errors import UserError
from shoal.optim.groups import OptimizerFactory
from shoal.planner.degrees import FIELDS, Spread, divisors, why_not_tokens
from shoal.planner.memory import KEPT
from shoal.planner.profile import Profile
from shoal.planner.state import optimizer_state
from shoal.planner.task import Numbers
from shoal.precision import Precision

HEADS = ("heads", "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "n_heads")
KEYS = ("kv_heads", "num_key_value_heads", "num_kv_heads")
MOST_PARTS = 64
"""Parts of a matrix at most, where no number of heads says how many there may be."""


def numbers_of(precision: Precision, optimizer: OptimizerFactory) -> Numbers:
    """Bytes of an element in each role."""
    model, master, grad = precision.model, precision.master, precision.grad
    side = 1000
    state = optimizer_state(optimizer, [{}], precision, shards=False).nbytes(0, torch.Size((side, side)))
    kept = 0 if model == master else KEPT.get(precision.keep, master.itemsize)
    rounded = "fp8" if precision.fp8 else "tf32" if precision.tf32 else ""
    return Numbers(model, model.itemsize, grad.itemsize, kept, state / side**2, rounded)


def legal_degrees(values: Mapping[str, Any], profile: Profile, sequence: int | None, per_host: int) -> dict[str, int]:
    """What degrees have to divide: matrices are cut by heads and inside of hosts, tokens of a row evenly, of which each
    rank has two at least, experts by their number; 1 where a trace was refused."""
    known, refused = _known(values, sequence), profile.refused
    heads = known.get("heads")
    found = {
        **known,
        "parts": _within(heads or MOST_PARTS, per_host) if not refused["parts"] else 1,
        "experts": (profile.num_experts or 1) if not refused["experts"] else 1,
    }
    if refused["ring"]:
        found["ring"] = 0
    if refused["tokens"]:
        found["heads"] = 1  # no way by heads
    if refused["tokens"] and refused["ring"]:
        found["tokens"] = 1
    return found


def check_tokens(pins: Mapping[str, Any], values: Mapping[str, Any], sequence: int | None, devices: int) -> None:
    """Raises UserError, before a model of these settings is traced, where ranks, `devices` of them in all, cannot share
    its rows, of `sequence` tokens, as it is pinned."""
    ranks, parts, known = pins.get("cp", 1), pins.get("tp", 1), _known(values, sequence)
    if ranks == 1 or sequence is None:
        return

    def whys(number: int, rings: Sequence[bool]) -> list[str]:
        found = [why_not_tokens(Spread(tokens=number, parts=parts, ring=ring), known) for ring in rings]
        return list(dict.fromkeys(found)) if all(found) else []

    rings = [pins["context"] == "ring"] if "context" in pins else [False, True]
    if against := whys(ranks, rings):
        beside = f" with plan.tp = {parts}" if parts > 1 else ""
        others = prod(pins.get(FIELDS[what], 1) for what in ("stages", "copies", "parts"))
        left = devices if devices % others else devices // others
        may = [number for number in divisors(left) if number == 1 or not whys(number, rings)]
        other = "" if whys(ranks, [False, True]) else f', or plan.context = "{"ulysses" if rings[0] else "ring"}"'
        raise UserError(
            f"plan.cp = {ranks}{beside}: {', and '.join(against)}: take plan.cp = {' or '.join(map(str, may))}{other}"
        )


def _known(values: Mapping[str, Any], sequence: int | None) -> dict[str, int]:
    """What settings say of how ranks may share tokens (see `why_not_tokens`)."""
    row, heads, keys = sequence or 1, _number(values, HEADS), _number(values, KEYS)
    found = {"tokens": row, "row": row, "ring": 0 if row % 2 else row // 2}
    return {**found, **({"heads": heads} if heads else {}), **({"keys": keys} if keys else {})}


def _within(heads: int, per_host: int) -> int:
    """The largest divisor of the number of heads that is one of a host's devices too: parts talk at every layer."""
    return max(each for each in range(1, max(per_host, 1) + 1) if heads % each == 0 and per_host % each == 0)


def _number(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int) and values[name] > 0), None)

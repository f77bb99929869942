"""From a model and its training to a task: the trace, the optimizer's bytes, and what degrees have to divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.optim.groups import OptimizerFactory
from shoal.planner.memory import KEPT
from shoal.planner.profile import Profile
from shoal.planner.state import optimizer_state
from shoal.planner.task import Numbers
from shoal.precision import Precision

HEADS = ("heads", "num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "n_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "experts")
MOST_PARTS = 64
"""Parts of a matrix at most, where no number of heads says how many there may be."""


def numbers_of(precision: Precision, optimizer: OptimizerFactory) -> Numbers:
    """Bytes of an element in each role."""
    model, master, grad = precision.model, precision.master, precision.grad
    side = 1000
    state = optimizer_state(optimizer, [{}], precision, shards=False).nbytes(0, torch.Size((side, side)))
    kept = 0 if model == master else KEPT.get(precision.keep, master.itemsize)
    return Numbers(model, model.itemsize, grad.itemsize, kept, state / side**2)


def legal_degrees(values: Mapping[str, Any], profile: Profile, sequence: int | None, per_host: int) -> dict[str, int]:
    """What degrees have to divide: matrices are cut by heads and inside of hosts, tokens of a row evenly, experts by
    their number; 1 where a trace was refused."""
    heads = _number(values, HEADS)
    experts = _number({**values, **(values.get("moe") or {})}, EXPERTS)
    refused = profile.refused
    ways = not refused["tokens"] or not refused["ring"]
    found = {
        "parts": _within(heads or MOST_PARTS, per_host) if not refused["parts"] else 1,
        "tokens": (sequence or 1) // 2 if ways else 1,
        "ring": int(not refused["ring"]),
        "experts": (experts or 1) if not refused["experts"] else 1,
    }
    if refused["tokens"]:
        found["heads"] = 1  # no way by heads
    elif heads:
        found["heads"] = heads
    return found


def _within(heads: int, per_host: int) -> int:
    """The largest divisor of the number of heads that is one of a host's devices too: parts talk at every layer."""
    return max(each for each in range(1, max(per_host, 1) + 1) if heads % each == 0 and per_host % each == 0)


def _number(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int) and values[name] > 0), None)

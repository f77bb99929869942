"""The largest model of a family that fits. A family is one shape at all sizes: what its members are, in order of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

AHEAD = 4
"""By how much a search goes beyond a size that fits."""
STEP = 64
"""Units of an LSTM's width, and what a given width of an MLP is rounded to."""


@dataclass(frozen=True)
class Family:
    """`member(i)`, i >= 1, is the `[model]` table of the i-th size; `rule` says what grows."""

    rule: str
    member: Callable[[int], dict[str, Any]]


def family(table: Mapping[str, Any], values: Mapping[str, Any]) -> Family | None:
    """The family of the model of a `[model]` table whose settings, with defaults filled in, are `values`; None of a model whose sizes are not known."""
    name = table.get("name")
    if name in ("gpt", "bert"):
        return Family("width and depth in the ratio of this model, heads as wide as its heads", _by_heads(table, values))
    if name == "lstm":
        return Family("width and depth in the ratio of this model", _by_width(table, values))
    if name == "hf" and isinstance(values.get("num_hidden_layers"), int):
        return Family("more layers of the same width", lambda size: {**table, "num_hidden_layers": size})
    return None


def _by_heads(table: Mapping[str, Any], values: Mapping[str, Any]) -> Callable[[int], dict[str, Any]]:
    """A member more has as many heads more as share a key."""
    shared = values["heads"] // (values.get("kv_heads") or values["heads"])
    head = values["d_model"] // values["heads"]

    def member(size: int) -> dict[str, Any]:
        heads = size * shared
        by = heads / values["heads"]
        found = {**table, "heads": heads, "d_model": heads * head, "layers": max(1, round(by * values["layers"]))}
        if values.get("kv_heads"):
            found["kv_heads"] = size
        if values.get("d_ff"):
            found["d_ff"] = STEP * max(1, round(by * values["d_ff"] / STEP))
        return found

    return member


def _by_width(table: Mapping[str, Any], values: Mapping[str, Any]) -> Callable[[int], dict[str, Any]]:
    def member(size: int) -> dict[str, Any]:
        by = size * STEP / values["hidden"]
        wide = {"hidden": size * STEP, "embedding": max(1, round(by * values["embedding"]))}
        return {**table, **wide, "layers": max(1, round(by * values["layers"]))}

    return member


def largest(free: Callable[[int], int], most: int = 2**12) -> int:
    """The largest size from 1 to `most` of which `free(size)`, bytes that are left, is not below 0; 0 if there is none. What is left falls with the
    size. Few sizes are asked for, as each may cost seconds: the next is where a straight line through two known ones meets 0, every third the middle."""
    left: dict[int, int] = {}
    low, high, size = 0, most + 1, 1
    while high - low > 1:
        left[size] = free(size)
        low, high = (size, high) if left[size] >= 0 else (low, size)
        size = min(max(_guess(left, low, high), low + 1), high - 1)
    return low


def _guess(left: Mapping[int, int], low: int, high: int) -> int:
    """Between `low` and `high`; where `high` is not known to be too large, at most `AHEAD` times `low`."""
    if high in left and len(left) % 3 == 0:
        return (low + high) // 2
    near = sorted(left, key=lambda size: abs(size - low))[:2]
    ends = [low, high] if high in left else near
    if len(ends) < 2 or low not in left or left[ends[0]] == left[ends[1]]:
        return AHEAD * low
    slope = (left[ends[1]] - left[ends[0]]) / (ends[1] - ends[0])
    root = int(low - left[low] / slope)
    return root if high in left else min(root, AHEAD * low)

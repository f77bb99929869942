"""The largest model of a family that fits. A family is one shape at all sizes: what its members are, in order of their
parameters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

AHEAD = 4
"""By how much a search goes beyond a size that fits."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
"""What configurations of transformers call the number of blocks of a causal language model."""
STEP = 64
"""Units of an LSTM's width, and what a given width of an MLP is rounded to."""


@dataclass(frozen=True)
class Family:
    """Models of one shape.

    - `rule`: says what grows
    - `member(i)`, i >= 1: the `[model]` table of the i-th size
    - `own`: the size nearest to the model that the family was made from
    - `depth`: the setting that is the number of blocks, None where blocks are no modules of their own
    - `growth`: the power of the size that memory about grows with
    """

    rule: str
    member: Callable[[int], dict[str, Any]]
    own: int
    depth: str | None = None
    growth: int = 3


def family(table: Mapping[str, Any], values: Mapping[str, Any]) -> Family | None:
    """Finds the family of the model of a `[model]` table whose settings, with defaults filled in, are `values`; None of
    a model whose sizes are not known."""
    name = table.get("name")
    if name in ("gpt", "bert"):
        rule = "width and depth in the ratio of this model, heads as wide as its heads"
        return Family(rule, _by_heads(table, values), values.get("kv_heads") or values["heads"], "layers")
    if name == "lstm":
        return Family(
            "width and depth in the ratio of this model",
            _by_width(table, values),
            max(1, round(values["hidden"] / STEP)),
        )
    key = next((each for each in DEPTHS if isinstance(values.get(each), int)), None)
    if name == "hf" and key is not None:
        given = {each: value for each, value in table.items() if each not in DEPTHS or each in values}
        return Family("more layers of the same width", lambda size: {**given, key: size}, values[key], key, growth=1)
    return None


def _by_heads(table: Mapping[str, Any], values: Mapping[str, Any]) -> Callable[[int], dict[str, Any]]:
    """Gives each next member as many heads more as share a key."""
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


def largest(
    free: Callable[[int], int], most: int = 2**12, known: Mapping[int, int] | None = None, growth: int = 2
) -> int:
    """Finds the largest size from 1 to `most` of which `free(size)`, bytes that are left, is not below 0; 0 if there is
    none. What is left falls with the size, by about its power `growth`. Few sizes are asked for, as each takes time:
    the next is where a curve through known ones meets 0, every seventh the middle.

    `known`: what is left of some sizes; of the smallest of them that is what there is for a model, as of size 0.
    """
    left = dict(known or {})
    low = max((size for size in left if left[size] >= 0), default=0)
    high = min((size for size in left if left[size] < 0), default=most + 1)
    while high - low > 1:
        size = min(max(_guess(left, low, high, growth), low + 1), high - 1)
        left[size] = free(size)
        low, high = (size, high) if left[size] >= 0 else (low, size)
    return low


def _guess(left: Mapping[int, int], low: int, high: int, growth: int) -> int:
    """Guesses between `low` and `high`; where `high` is not known to be too large, at most `AHEAD` times `low`."""
    if high in left and len(left) % 7 == 0:
        return (low + high) // 2
    if len(left) < 2:
        return AHEAD * low
    least = min(left)
    points = [(size, left[size]) for size in sorted(left, key=lambda size: abs(size - low))[: max(3, growth + 1)]]

    def through(size: int) -> float:
        if len(left) > 2 or growth == 1:
            return _through(points, size)
        other = max(left)
        return left[least] + (left[other] - left[least]) * ((size - least) / (other - least)) ** growth

    limit = high if high in left else min(high, AHEAD * low + 1) if low else high
    return bisect_left(range(limit), True, low + 1, key=lambda size: through(size) < 0) - 1


def _through(points: Sequence[tuple[int, int]], size: int) -> float:
    """The value at `size` of the polynomial through `points`."""
    return sum(
        value * prod((size - other) / (at - other) for other, _ in points if other != at) for at, value in points
    )

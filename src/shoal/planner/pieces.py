"""The pieces of a model that stages consist of, and what ranks send that divide them."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.planner.degrees import Spread
from shoal.planner.profile import Message, PartProfile


def kind(message: Message) -> str:
    """Who sends it: "ring" is a way in which ranks share tokens."""
    return "tokens" if message.what == "ring" else message.what


def sent(message: Message, spread: Spread, rows: float) -> tuple[int, float, float]:
    """Ranks, calls and bytes of a message of a forward of `rows` rows. It was seen between two ranks: what ranks that
    share tokens send is a part of a row, and a ring passes it on to each of the others."""
    what = kind(message)
    ranks = getattr(spread, what)
    if ranks == 1 or (what == "tokens" and (message.what == "ring") != spread.ring):
        return 1, 0.0, 0.0
    payload, calls = message.payload * rows, message.calls
    if what == "tokens":
        payload *= 2 / (ranks * spread.parts)
        if spread.ring:
            payload, calls = payload * (ranks - 1), calls * (ranks - 1)
    else:
        payload /= spread.tokens
    return ranks, calls, payload


def grouped(parts: Sequence[PartProfile]) -> list[list[PartProfile]]:
    """Groups parts into pieces as stages are cut (see pipeline.units.pieces_of)."""
    if not any(part.is_block for part in parts):
        return [[part] for part in parts]
    found: list[list[PartProfile]] = []
    before: list[PartProfile] = []
    for part in parts:
        if part.is_block:
            found.append([*before, part])
            before = []
        elif found:
            found[-1].append(part)
        else:
            before.append(part)
    return found

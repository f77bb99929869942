"""Finds the elements of a sample that a rank has, for a tensor made in a forward; keyed randomness needs them."""

from __future__ import annotations

from torch import Tensor

from shoal.parallel.context.context import Context
from shoal.parallel.tensor import Region


class Parts:
    """The part of a sample on this rank: the tokens left by `context` and `region`, and the heads dealt out by both."""

    def __init__(self, region: Region | None, context: Context | None) -> None:
        self._region, self._context = region, context

    def __call__(self, x: Tensor, elements: int) -> list[tuple[int, int]]:
        """Returns the stretches (first element, number) of a whole sample that make up the `elements` per sample of
        `x`."""
        piece = None if self._region is None else self._region.next_draw()
        if piece is not None and self._region is not None:
            first, run, apart = piece.runs(x, elements, self._region.rank, self._region.size)
            return [(first + at * apart, run) for at in range(elements // run)]
        if x.dim() == 4 and x.shape[2] == x.shape[3]:  # attention weights [B, H, T, T]
            return [(self._heads_before(x.shape[1]) * elements, elements)]
        runs = self.tokens()
        tokens = sum(number for _, number in runs)
        here = x.shape[1] if x.dim() > 2 else elements // max(1, x.shape[-1])  # x is [B, T, ..] or [B T, D]
        if not tokens or here != tokens:
            return [(0, elements)]
        each = elements // tokens
        return [(start * each, number * each) for start, number in runs]

    def _heads_before(self, heads: int) -> int:
        """Returns how many ranks, with `heads` heads each, have the heads before these."""
        context = self._context if self._context is not None and self._context.attending else None
        dealt = 1 if context is None else context.size
        before = self._region.rank if self._region is not None and self._region.has_heads(heads, dealt) else 0
        return before if context is None else before * dealt + context.rank

    def tokens(self, along_cp: int | None = None, along_tp: int | None = None) -> list[tuple[int, int]]:
        """Returns the tokens of a row that a rank has, this one by default, as stretches (first, number)."""
        runs = self._context.runs(along_cp) if self._context is not None and self._context.is_open else []
        if self._region is None or not self._region.sequence:
            return runs
        before, number = self._region.tokens_of(self._region.rank if along_tp is None else along_tp)
        return _between(runs, before, number) if runs else [(before, number)]


def _between(runs: list[tuple[int, int]], before: int, number: int) -> list[tuple[int, int]]:
    """Returns the `number` elements that come after the first `before` ones of the stretches `runs`, as stretches."""
    found = []
    for start, length in runs:
        skipped = min(before, length)
        taken = min(number, length - skipped)
        if taken:
            found.append((start + skipped, taken))
        before, number = before - skipped, number - taken
    return found

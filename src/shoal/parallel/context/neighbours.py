"""What a loss does with the tokens of a row by their place, or with rows as a whole, of which a rank has a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.module.calls import calls_of
from shoal.parallel.context.asked import check_result
from shoal.parallel.in_loss import InLoss

# Of functions that pick or move elements by their place: the dims along which they do, from their arguments.


def _narrow(input: Tensor, dim: int, start: Any, length: int) -> Iterable[int]:
    return [dim] if length < input.shape[dim] else []


def _at(input: Tensor, dim: int, *rest: Any, **named: Any) -> Iterable[int]:
    return [dim]


def _roll(input: Tensor, shifts: Any, dims: int | Sequence[int] = ()) -> Iterable[int]:
    return [dims] if isinstance(dims, int) else dims or range(input.dim())


def _flip(input: Tensor, *given: Any, dims: Iterable[int] = ()) -> Iterable[int]:
    found: Iterable[int] = given[0] if given and not isinstance(given[0], int) else given or dims
    return found


def _diff(input: Tensor, n: int = 1, dim: int = -1, *rest: Any, **named: Any) -> Iterable[int]:
    return [dim]


def _pad(input: Tensor, pad: Sequence[int], *rest: Any, **named: Any) -> Iterable[int]:
    return [-1 - at // 2 for at, number in enumerate(pad) if number]


MOVES: dict[str, Callable[..., Iterable[int]]] = {
    "narrow": _narrow,
    "select": _at,
    "index_select": _at,
    "cumsum": _at,
    "roll": _roll,
    "flip": _flip,
    "diff": _diff,
    "pad": _pad,
}
"""By the name of the function."""


class Neighbours(InLoss):
    """Refuses in a loss, outside of its model, to pick tokens by their place in a row (`logits[:, :-1]`), or to move
    them: this rank has other ones. Refuses results of the model that are those of rows.

    ranks: those that share a row
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks, self._rows, self._parts = ranks, torch.Size(), set[nn.Module]()

    def know(self, module: nn.Module) -> None:
        """Takes the parts of the model, of which a loss may call one by itself."""
        self._parts = set(module.modules())

    @contextmanager
    def looking_at(self, rows: torch.Size) -> Iterator[None]:
        """Wraps a loss. `rows`: of this rank's tokens, [B, T / ranks]."""
        self._rows = rows
        with self.looking():
            yield

    def out_of_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_open:
            check_result(module, output, self._rows)
        super().out_of_model(module, args, output)

    def check_places(self) -> None:
        """Raises UserError where attention runs in a part of the model that the loss has called by itself, without
        position_ids: it takes this rank's tokens for the first ones of a row."""
        if not self._is_open or self._in_model:
            return
        calls = list(calls_of(self._parts))
        if not calls or calls[-1][1].get("position_ids") is None:  # the outermost one, by the loss itself
            raise UserError(
                f"plan.cp = {self._ranks}: the loss calls a part of the model, which takes this rank's tokens for the "
                "first ones of their rows: call the model itself, or give that part "
                'position_ids=microbatch["position_ids"]'
            )

    def check(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        if self._is_part(*args) if func is Tensor.__getitem__ else self._moves(func, args, kwargs):
            raise UserError(
                f"plan.cp = {self._ranks}: the loss picks tokens by their place in a row, or moves them, as "
                "logits[:, :-1] and labels.roll(-1, 1) do, and each rank has its own part of a row: take labels that "
                "are the next tokens already, with -100 where there is none, and count all tokens that have one"
            )

    def _moves(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """True if `func` picks or moves tokens of [B, T / ranks, ..] by their place."""
        along = MOVES.get(getattr(func, "__name__", ""))
        x = args[0] if args else kwargs.get("input")
        if along is None or not isinstance(x, Tensor) or x.shape[:2] != self._rows:
            return False
        return 1 in {dim % x.dim() for dim in along(*args, **kwargs)}

    def _is_part(self, x: Tensor, index: Any) -> bool:
        """True if `x[index]` leaves out tokens of [B, T / ranks, ..] by their place."""
        if x.shape[:2] != self._rows:
            return False
        each = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(one, Tensor | list) for one in each):
            return False
        if any(one is ... for one in each):
            at = next(place for place, one in enumerate(each) if one is ...)
            each[at : at + 1] = [slice(None)] * (x.dim() - sum(one is not None for one in each) + 1)
        each = [one for one in each if one is not None]
        if len(each) < 2:
            return False
        tokens = range(x.shape[1])
        return isinstance(each[1], int) or (isinstance(each[1], slice) and len(tokens[each[1]]) < len(tokens))

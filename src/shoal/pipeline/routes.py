"""Routes: the values that go from stage to stage of a pipeline, for each kind of microbatch. `find_routes` finds
them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shoal.comm import wire


@wire.sent
@dataclass(frozen=True, order=True)
class Value:
    """A tensor that a part of the model returns.

    unit: index of the part
    call: number of the call of the part in a forward, from 0
    leaf: index of the tensor among the leaves of what the call returns
    """

    unit: int
    call: int
    leaf: int


@wire.sent
@dataclass(frozen=True)
class Shape:
    """The size and dtype of a value, as it travels."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        """Makes zeros that hold memory for one element."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.size)

    def unused(self, device: torch.device) -> Tensor:
        """Makes what stands for a value that does not travel: not a number, so that nothing which comes to use it goes
        unnoticed (0 where there is none), with memory for one element."""
        fill = math.nan if self.dtype.is_floating_point else 0
        return torch.full((), fill, dtype=self.dtype, device=device).expand(self.size)


@wire.sent
@dataclass(frozen=True)
class Given:
    """The result of one call of a part, what is collected of it (see captured_outputs), and what it has left on its
    modules by name (see left), shapes in place of tensors."""

    result: Any

    @classmethod
    def of(cls, result: Any) -> Given:
        return cls(tree_map_only(Tensor, lambda leaf: Shape(tuple(leaf.shape), leaf.dtype), result))

    @cached_property
    def leaves(self) -> list[Any]:
        return tree_leaves(self.result)

    @property
    def left(self) -> Iterable[str]:
        """The names of what the part has left on its modules."""
        names: Iterable[str] = self.result[2]
        return names

    def made(self, tensor: Callable[[int, Shape], Tensor]) -> Any:
        """Returns the result with `tensor(leaf, shape)` in place of its tensors."""
        leaves, tree = tree_flatten(self.result)
        return tree_unflatten(
            [tensor(place, leaf) if isinstance(leaf, Shape) else leaf for place, leaf in enumerate(leaves)], tree
        )


WITHIN = (
    "what depends on values has to lie in the last stage, with the parts that it calls and all that come behind them "
    "(plan.stages names them), or inside of one block (an item of an nn.ModuleList, with a forward of its own), or "
    "take plan.pp = 1"
)
"""What to do with a model whose shapes, between its parts, depend on values."""


@wire.sent
@dataclass(frozen=True)
class Stage:
    """The values that a stage's forward gives and needs.

    given: results of calls of its own parts, by (part, call)
    needs: values of earlier stages that it uses
    filled: values of earlier stages whose tensors it writes to
    changed: its own values that are written to after they were given
    said: the state that its parts leave for later ones (split.Remembers)
    by_values: shapes are made of values between its parts
    """

    given: dict[tuple[int, int], Given]
    needs: frozenset[Value]
    filled: frozenset[Value]
    changed: frozenset[Value]
    said: list[Any]
    by_values: bool


@dataclass
class Routes:
    """The stages of one kind of microbatch, in order, and what goes between them."""

    stages: list[Stage] = field(default_factory=list)
    _between: dict[tuple[int, int], list[Value]] = field(default_factory=dict)

    def given(self, unit: int, call: int) -> Given | None:
        return next((stage.given[unit, call] for stage in self.stages if (unit, call) in stage.given), None)

    def shape(self, value: Value) -> Shape:
        given = self.given(value.unit, value.call)
        assert given is not None
        return given.leaves[value.leaf]

    def between(self, source: int, target: int) -> list[Value]:
        """Returns the values that `target` needs from `source`, in the order in which they travel. All stages must be
        known."""
        if (source, target) not in self._between:
            own = self.stages[source].given
            found = sorted(value for value in self.stages[target].needs if (value.unit, value.call) in own)
            self._between[source, target] = found
        return self._between[source, target]

    def back(self, source: int, target: int) -> list[Value]:
        """Returns those of `between` whose gradients come back."""
        return [value for value in self.between(source, target) if self.shape(value).dtype.is_floating_point]

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the pairs of stages (source, target) between which something travels."""
        number = len(self.stages)
        return [
            (source, target)
            for source in range(number)
            for target in range(source + 1, number)
            if self.between(source, target)
        ]


class Calls:
    """Numbers the calls of each part in one forward, from 0."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def count(self, unit: int) -> int:
        """Returns the number of the call that begins."""
        self._numbers[unit] = self._numbers.get(unit, -1) + 1
        return self._numbers[unit]

    def since(self, unit: int) -> list[int]:
        """Returns `unit` and the parts that were first called behind it, in order."""
        order = [*self._numbers]
        return order[order.index(unit) :]

    def called(self, unit: int) -> int:
        """Returns the number of calls so far."""
        return self._numbers.get(unit, -1) + 1

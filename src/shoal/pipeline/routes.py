"""Which values go from which stage to which, found out by running: once for each kind of microbatch, one stage after the other.

The stage that looks runs its forward on what earlier stages have said their parts give: zeros of those shapes, each marked by where it comes from. Whatever is computed of marked values is marked
too; the marks on what this stage's own parts are called with, and on the loss, are the values that it needs. So a mask made of token ids is no message, and an output that skips a stage is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shoal.comm import Group, wire
from shoal.errors import UserError
from shoal.pipeline.split import Split

READS = "the model reads, outside its parts, the value of something that another stage computes"


@wire.sent
@dataclass(frozen=True, order=True)
class Value:
    """A tensor that a part of the model gives: the `leaf`-th of what its `call`-th call in a forward returns."""

    unit: int
    call: int
    leaf: int


@wire.sent
@dataclass(frozen=True)
class Shape:
    """Of a value, as it travels."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=device)

    def zeros(self, device: torch.device) -> Tensor:
        """Of which one element is held."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.size)


@wire.sent
@dataclass(frozen=True)
class Given:
    """What one call of a part gives, and what is collected of it (see taps), with the shapes of tensors in their places."""

    result: Any

    @classmethod
    def of(cls, result: Any) -> Given:
        return cls(tree_map_only(Tensor, lambda leaf: Shape(tuple(leaf.shape), leaf.dtype), result))

    @cached_property
    def leaves(self) -> list[Any]:
        return tree_leaves(self.result)

    def made(self, tensor: Callable[[int, Shape], Tensor]) -> Any:
        """The same with `tensor(leaf, shape)` for its tensors."""
        leaves, tree = tree_flatten(self.result)
        return tree_unflatten(
            [tensor(place, leaf) if isinstance(leaf, Shape) else leaf for place, leaf in enumerate(leaves)], tree
        )


@wire.sent
@dataclass(frozen=True)
class Stage:
    """What one stage's forward does: what calls of its own parts give, which values of earlier stages it `needs`, which of those that stand for others' are written to,
    and which of its own are after they were given. `said`: what its parts say to later ones beside (split.Remembers)."""

    given: dict[tuple[int, int], Given]
    needs: frozenset[Value]
    filled: frozenset[Value]
    changed: frozenset[Value]
    said: list[Any]


@dataclass
class Routes:
    """Of one kind of microbatch: all stages, in order."""

    stages: list[Stage] = field(default_factory=list)
    _between: dict[tuple[int, int], list[Value]] = field(default_factory=dict)

    def given(self, unit: int, call: int) -> Given | None:
        return next((stage.given[unit, call] for stage in self.stages if (unit, call) in stage.given), None)

    def shape(self, value: Value) -> Shape:
        given = self.given(value.unit, value.call)
        assert given is not None
        return given.leaves[value.leaf]

    def between(self, source: int, target: int) -> list[Value]:
        """The values that `target` needs of `source`, in the order in which they travel; once all stages are known."""
        if (source, target) not in self._between:
            own = self.stages[source].given
            found = sorted(value for value in self.stages[target].needs if (value.unit, value.call) in own)
            self._between[source, target] = found
        return self._between[source, target]

    def back(self, source: int, target: int) -> list[Value]:
        """Those of them whose gradients come back."""
        return [value for value in self.between(source, target) if self.shape(value).dtype.is_floating_point]

    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of stages (source, target) between which something travels."""
        number = len(self.stages)
        return [
            (source, target) for source in range(number) for target in range(source + 1, number) if self.between(source, target)
        ]


def find_routes(
    split: Split, number: int, rank_of: Callable[[int], int], group: Group, run: Callable[[], Any], device: torch.device
) -> Routes:
    """All ranks of `group` call it, those of one pipeline, with the same kind of microbatch; `run()` gives the loss of it by the model."""
    routes = Routes()
    for stage in range(number):
        mine = rank_of(stage) == group.rank
        failed: Exception | None = None
        found: bytes | str | None = None
        if mine:
            try:
                seen = look(split, stage, routes, run, device)
                found = seen if isinstance(seen, str) else wire.pack(seen)  # here, where it may still fail for all
            except Exception as error:  # the others are to hear of it
                failed = error
                found = str(error) if isinstance(error, UserError) else _what_fails(stage, error)
        told = group.broadcast_object(found, src=rank_of(stage))
        if isinstance(told, str):
            raise failed or UserError(told)
        routes.stages.append(wire.unpack(told))
    return routes


def _what_fails(stage: int, error: Exception) -> str:
    return (
        f"stage {stage} cannot be run on zeros in place of what earlier stages give, by which is found out what travels: {type(error).__name__}: {error}. A forward may not depend on the values "
        "of what another stage computes, but inside its parts: name the stages by hand (plan.stages) so that this lies in one, or take plan.pp = 1"
    )


def look(split: Split, stage: int, routes: Routes, run: Callable[[], Any], device: torch.device) -> Stage | str:
    """What `stage`, whose earlier ones are in `routes`, does; why it cannot be one, if it cannot."""
    seen = _Look(split, stage, routes, device)
    if stage:
        split.hear(routes.stages[-1].said)
    try:
        with torch.no_grad(), seen.marks, seen.set_apart():
            result = split.run(stage, seen, run)
            seen.use(result)
    except _Unfit as error:
        return str(error)
    is_last = stage == max(split.stages)  # what the last one gives is nobody else's
    given, changed = ({}, frozenset[Value]()) if is_last else (seen.given, seen.changed())
    return Stage(given, frozenset(seen.needs), frozenset(seen.marks.written), changed, split.said())


class _Unfit(Exception):
    """The model cannot be cut here; said to all ranks."""


class Calls:
    """Numbers the calls of each part in one forward, from 0."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def count(self, unit: int) -> int:
        """The number of the call that begins."""
        self._numbers[unit] = self._numbers.get(unit, -1) + 1
        return self._numbers[unit]

    def called(self, unit: int) -> int:
        """How many calls there have been."""
        return self._numbers.get(unit, -1) + 1


class _Look(Calls):
    """A forward of `stage` that notes what it needs (split.Forward)."""

    def __init__(self, split: Split, stage: int, routes: Routes, device: torch.device) -> None:
        super().__init__()
        self._split, self._stage, self._routes, self._device = split, stage, routes, device
        self.marks = _Marks(
            lambda what: _Unfit(f"{what}; that cannot be cut out of its stage: name the stages by hand (plan.stages)"),
            stage == max(split.stages),
        )
        self.given: dict[tuple[int, int], Given] = {}
        self.needs: set[Value] = set()
        self._own: list[tuple[Value, Tensor, int]] = []
        self._is_apart = 0

    @contextmanager
    def set_apart(self) -> Iterator[None]:
        """Around the forward: knows what runs inside torch's reentrant checkpoint, apart from the graph, so that no gradient would find its way to what another stage gave."""
        before = torch_checkpoint.CheckpointFunction
        torch_checkpoint.CheckpointFunction = self  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            torch_checkpoint.CheckpointFunction = before  # type: ignore[misc]

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Stands in for that checkpoint."""
        self._is_apart += 1
        try:
            return function(*args)
        finally:
            self._is_apart -= 1

    def _check_not_apart(self, unit: int) -> None:
        if self._is_apart:
            raise _Unfit(
                f"{self._split.units[unit].name} is called inside torch.utils.checkpoint.checkpoint(.., use_reentrant=True), through which gradients do not travel between stages: give "
                'use_reentrant=False, or leave it out and take plan.recompute = "full"'
            )

    def use(self, values: Any) -> None:
        """Notes that `values` are used here."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                needed = self.marks.of(leaf)
                self.needs |= needed
                for value in needed:
                    if self._routes.shape(value).dtype.is_complex:
                        raise _Unfit(
                            f"{self._split.units[value.unit].name} gives complex numbers to stage {self._stage}, and only real ones travel: view them as real, or give both to one stage (plan.stages)"
                        )

    def own(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> Any:
        self._check_not_apart(unit)
        self.use((args, kwargs))
        with self.marks.paused():
            result, beside = self._split.taps.run(unit, part, args, kwargs)
        call = self.count(unit)
        self.given[unit, call] = Given.of((result, beside))
        for place, leaf in enumerate(tree_leaves((result, beside))):
            if isinstance(leaf, Tensor):
                self.marks.clear(leaf)
                self._own.append((Value(unit, call, place), leaf, leaf._version))
            elif _hides_tensors(leaf) and self._stage < max(self._split.stages):
                raise _Unfit(
                    f"{self._split.units[unit].name} gives a {type(leaf).__name__}, in which tensors are not found: let it give tensors, tuples, dicts, or a class that "
                    "torch.utils._pytree.register_dataclass or register_pytree_node has made known"
                )
        return result

    def elsewhere(self, unit: int) -> Any:
        self._check_not_apart(unit)
        call = self.count(unit)
        given = self._routes.given(unit, call)
        if given is None:
            name, its = self._split.units[unit].name, self._split.stages[unit]
            if call:
                raise _Unfit(
                    f"the model calls {name} more than once, with parts of other stages in between, and a stage runs once for a microbatch: give all of them to one stage (plan.stages), or take "
                    "plan.pp = 1"
                )
            raise _Unfit(
                f"stage {self._stage} calls {name}, which stage {its} has and does not call before it is through: give both to one stage, or name them in the order of "
                "the calls (plan.stages), or take plan.pp = 1"
            )

        def placeholder(leaf: int, shape: Shape) -> Tensor:
            return self.marks.mark(shape.zeros(self._device).clone(), Value(unit, call, leaf))

        result, beside = given.made(placeholder)
        self._split.taps.replay(unit, beside)
        return result

    def changed(self) -> frozenset[Value]:
        return frozenset(value for value, tensor, version in self._own if tensor._version != version)


class _Marks(TorchDispatchMode):
    """Follows, by memory, which values tensors are computed of. `written`: marked ones of the first hand that were written to."""

    def __init__(self, unfit: Callable[[str], Exception], is_last: bool) -> None:
        super().__init__()
        self._unfit, self._is_last = unfit, is_last
        self._marks: dict[int, frozenset[Value]] = {}
        self._first: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # memory is known by its address, which must not be used twice
        self._is_paused = False
        self.written: set[Value] = set()

    def mark(self, tensor: Tensor, value: Value) -> Tensor:
        self._alive.append(tensor)
        self._marks[_memory(tensor)] = frozenset([value])
        self._first[_memory(tensor)] = value
        return tensor

    def clear(self, tensor: Tensor) -> None:
        """A part of this stage has made it; what it was made of is noted."""
        self._alive.append(tensor)
        self._marks.pop(_memory(tensor), None)

    def of(self, tensor: Tensor) -> frozenset[Value]:
        return self._marks.get(_memory(tensor), frozenset())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is followed, nor seen to be."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        marks = frozenset[Value]().union(*(self.of(each) for each in inputs))
        if func is torch.ops.aten._local_scalar_dense.default and marks:
            raise self._unfit(READS)
        if marks and not self._is_last and torch.Tag.dynamic_output_shape in func.tags and _by_values(func, inputs):
            raise self._unfit("the shape of something between the model's parts depends on the values of what another stage computes")
        if func._schema.is_mutable:
            self.written |= {self._first[_memory(each)] for each in inputs if _memory(each) in self._first}
        out = func(*args, **kwargs)
        if marks and isinstance(out, bool | int | float):
            raise self._unfit(READS)
        for each in _tensors(out):
            self._alive.append(each)
            if marks:
                self._marks[_memory(each)] = self.of(each) | marks
        return out


def _by_values(func: Any, inputs: Sequence[Tensor]) -> bool:
    """Whether the shape of what `func` gives depends on values: picking rows by numbers has that of the numbers."""
    return func is not torch.ops.aten.index.Tensor or any(each.dtype in (torch.bool, torch.uint8) for each in inputs[1:])


def _tensors(tree: Any) -> Sequence[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _hides_tensors(leaf: Any) -> bool:
    """Whether an object that torch takes for a constant has tensors."""
    return any(isinstance(each, Tensor) for each in tree_leaves(dict(getattr(leaf, "__dict__", {}))))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

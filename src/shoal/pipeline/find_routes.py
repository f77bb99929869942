"""Finds routes by running: once for each kind of microbatch, one stage after the other.

The stage that looks runs its forward on zeros, of the shapes that earlier stages have reported for the results of their
parts, each marked by its origin. Whatever is computed from marked values is marked too. The values that a stage needs
are the marks on the arguments of its own parts, on the loss, and, for the last stage, on the buffers outside of all
parts, which are kept as it has them. So a mask computed from token ids is not sent, and an
output that skips a stage is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_leaves

from shoal.comm import Group, wire
from shoal.errors import UserError
from shoal.module.compiling import as_written
from shoal.module.reads import Reads
from shoal.parallel.axis import StaysHere
from shoal.pipeline.derivatives import BETWEEN, Derivatives, with_derivatives
from shoal.pipeline.handed import Handed, changed, hidden
from shoal.pipeline.left import attributes, left, put
from shoal.pipeline.marks import Marks
from shoal.pipeline.routes import WITHIN, Calls, Given, Routes, Shape, Stage, Value
from shoal.pipeline.split import Split

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def find_routes(
    split: Split, number: int, rank_of: Callable[[int], int], group: Group, run: Callable[[], Any], device: torch.device
) -> Routes:
    """Finds the routes of one kind of microbatch. Collective over the pipeline, whose ranks give the same kind.

    split: the model's parts by stage
    number: of stages
    rank_of: rank_of(stage) is the rank in `group` that has it
    group: the ranks of the pipeline
    run: run() gives the model's loss of the microbatch
    device: of the placeholders

    Raises UserError, on every rank alike, if a stage cannot be run without the others.
    """
    routes = Routes()
    for stage in range(number):
        mine = rank_of(stage) == group.rank
        failed: Exception | None = None
        found: bytes | str | None = None
        if mine:
            try:
                seen = look(split, stage, routes, run, device)
                found = seen if isinstance(seen, str) else wire.pack(seen)  # inside the try: it may fail, too
            except Exception as error:  # told to all ranks, which would wait for this one
                failed = error
                found = str(error) if isinstance(error, UserError) else _what_fails(stage, error)
                if not isinstance(error, UserError):
                    error.add_note(found)
        told = group.broadcast_object(found, src=rank_of(stage))
        if isinstance(told, str):
            raise failed or UserError(told)
        routes.stages.append(wire.unpack(told))
    return routes


def _what_fails(stage: int, error: Exception) -> str:
    if not stage:  # it is given nothing of others
        return f"the forward of stage 0 fails: {type(error).__name__}: {error}"
    return (
        f"stage {stage} cannot be run on zeros in place of what earlier stages give, by which is found out what "
        f"travels: {type(error).__name__}: {error}. Where one process can run the forward, it depends on the values of "
        f"what another stage computes, which it may do inside its parts alone: {WITHIN}"
    )


def look(split: Split, stage: int, routes: Routes, run: Callable[[], Any], device: torch.device) -> Stage | str:
    """Returns what `stage` gives and needs, `routes` having the earlier ones; or, as text, why it cannot be a stage."""
    seen, is_last = _Look(split, stage, routes, device), stage == max(split.stages)
    if stage:
        split.hear(routes.stages[-1].said)
    try:
        watching = Reads(seen.marks.read), Derivatives(seen.derived)
        with torch.no_grad(), as_written(), seen.marks, watching[0], watching[1], seen.set_apart(), _Unchecked():
            result = split.run(stage, seen, run)
            seen.use(result)
            if is_last:
                seen.use(split.common_values)
    except _Unfit as error:
        return str(error)
    except Exception as error:
        if isinstance(error, UserError) or seen.in_a_part or not seen.marks.by_values:
            raise
        raise UserError(_what_fails(stage, error)) from error
    changed = frozenset[Value]() if is_last else seen.changed()  # no other stage uses the results of the last
    by_values = seen.marks.by_values
    return Stage(seen.given, frozenset(seen.needs), frozenset(seen.marks.written), changed, split.said(), by_values)


class _Unchecked(TorchFunctionMode):
    """`one_hot` of a given number of classes, which torch would check by reading values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.one_hot:
            ids, number = _one_hot_of(*args, **(kwargs or {}))
            if number > 0:
                return (ids.unsqueeze(-1) == torch.arange(number, device=ids.device)).long()
        return func(*args, **(kwargs or {}))


def _one_hot_of(tensor: Tensor, num_classes: int = -1) -> tuple[Tensor, int]:
    """Returns the arguments of a call of `one_hot`."""
    return tensor, num_classes


class _Unfit(Exception):
    """Raised if the model cannot be cut; all ranks are told."""


class _Look(Calls):
    """A forward of `stage` that records what it gives and needs (a split.Forward)."""

    def __init__(self, split: Split, stage: int, routes: Routes, device: torch.device) -> None:
        super().__init__()
        self._split, self._stage, self._routes, self._device = split, stage, routes, device
        self.marks = Marks(
            lambda what: _Unfit(f"{what}: {WITHIN}"),
            stage == max(split.stages),
        )
        self.given: dict[tuple[int, int], Given] = {}
        self.needs: set[Value] = set()
        self._own: list[tuple[Value, Tensor, int]] = []
        self.in_a_part = False
        self._is_apart = 0

    @contextmanager
    def set_apart(self) -> Iterator[None]:
        """Detects, in the context, forwards inside torch's reentrant checkpoint.

        Its graph is a separate one, so no gradient would reach the values of other stages.
        """
        before = torch_checkpoint.CheckpointFunction
        torch_checkpoint.CheckpointFunction = self  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            torch_checkpoint.CheckpointFunction = before  # type: ignore[misc]

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Stands in for torch's `CheckpointFunction.apply`."""
        self._is_apart += 1
        try:
            return function(*args)
        finally:
            self._is_apart -= 1

    def _check_not_apart(self, unit: int) -> None:
        if self._is_apart:
            raise _Unfit(
                f"{self._split.units[unit].name} is called inside torch.utils.checkpoint.checkpoint(.., "
                "use_reentrant=True), through which gradients do not travel between stages: give "
                'use_reentrant=False, or leave it out and take plan.recompute = "full"'
            )

    def use(self, values: Any) -> None:
        """Records that `values` are used on this stage."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                needed = self.marks.of(leaf)
                self.needs |= needed
                for value in needed:
                    if self._routes.shape(value).dtype.is_complex:
                        raise _Unfit(
                            f"{self._split.units[value.unit].name} gives complex numbers to stage {self._stage}, and "
                            "only real ones travel: view them as real, or give both to one stage (plan.stages)"
                        )

    def own(self, unit: int, part: nn.Module, args: Any, kwargs: Any) -> Any:
        self._check_not_apart(unit)
        self.use([vars(each) for each in part.modules()])  # a forward may put a tensor on a part
        self.use(hidden((args, kwargs), set()))
        before, handed = attributes(part), Handed(args, kwargs)
        there = handed.now()
        self.in_a_part = True
        with self.marks.paused():
            result, beside = with_derivatives(partial(self._split.taps.run, unit, part), args, kwargs)
        self.in_a_part = False
        now = handed.now()
        if there.keys() - now.keys():
            raise _Unfit(
                f"{self._split.units[unit].name} takes something out of a list, a dict or an object that it is given, "
                "which parts of other stages would find there: let the model do so, or take plan.pp = 1"
            )
        call, behind = self.count(unit), {**left(part, before), **changed(there, now)}
        travels = self._stage < max(self._split.stages)
        if travels:
            self.given[unit, call] = self._given(unit, (result, beside, behind))
        for place, leaf in enumerate(tree_leaves((result, beside, behind))):
            if isinstance(leaf, Tensor):
                self.marks.clear(leaf)
                self._own.append((Value(unit, call, place), leaf, leaf._version))
            elif travels and _hides_tensors(leaf):
                raise _Unfit(_why_not_given(self._split.units[unit].name, leaf))
        return result

    def _given(self, unit: int, result: Any) -> Given:
        """Returns the result of a call as other stages know it."""
        try:
            return Given.of(result)
        except Exception as error:  # of a class that looks at what it is made of
            raise _Unfit(
                f"{self._split.units[unit].name} gives an object of a class that looks at the tensors which it is made "
                "of, as PackedSequence does, and so it does not travel: let the part give plain tensors, give it and "
                "all parts behind it to the last stage (plan.stages), or take plan.pp = 1"
            ) from error

    def elsewhere(self, unit: int, args: Any, kwargs: Any) -> Any:
        self._check_not_apart(unit)
        if function := _function_around():
            raise _Unfit(
                f"{self._split.units[unit].name} is called inside the forward of {function}, a torch.autograd.Function "
                "whose backward runs in one stage: give all parts that it calls, and all that come behind them, to the "
                "last stage (plan.stages), or take plan.pp = 1"
            )
        call = self.count(unit)
        given = self._routes.given(unit, call)
        if given is None:
            name, its = self._split.units[unit].name, self._split.stages[unit]
            if call:
                since = [self._split.units[each].name for each in self.since(unit)]
                raise _Unfit(
                    f"the model calls {name} more than once, with parts of other stages in between, and a stage runs "
                    f"once for a microbatch: give it and what comes between to one stage ({', '.join(since)}, or what "
                    "these lie in, in one list of plan.stages), or take plan.pp = 1"
                )
            order = "give both to one stage, or name them in the order of the calls (plan.stages), or take plan.pp = 1"
            raise _Unfit(
                f"stage {self._stage} calls {name}, which stage {its} has and does not call before it is through: "
                f"{WITHIN if self.marks.by_values else order}"
            )

        def placeholder(leaf: int, shape: Shape) -> Tensor:
            return self.marks.mark(shape.zeros(self._device).clone(), Value(unit, call, leaf))

        result, beside, behind = given.made(placeholder)
        self._split.taps.replay(unit, beside)
        put(self._split.units[unit].module, Handed(args, kwargs).put(behind))
        return result

    def derived(self) -> None:
        if not self.in_a_part:
            raise _Unfit(BETWEEN)

    def changed(self) -> frozenset[Value]:
        return frozenset(value for value, tensor, version in self._own if tensor._version != version)


def _function_around() -> str:
    """Returns the name of the autograd function inside whose forward the model calls a part; "" if there is none.

    Autograd sees nothing of what runs there: a stage that leaves in the middle of it would send values that no gradient
    comes back to. Reversible layers are written so.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not look.__code__:
        if frame.f_code is _APPLY:
            return str(frame.f_locals["cls"].__name__)
        frame = frame.f_back
    return ""


def _why_not_given(part: str, leaf: Any) -> str:
    """Why an object of the results of `part` does not travel: what it says itself, with what would do."""
    if isinstance(leaf, StaysHere):
        return leaf.why_it_stays(part)
    return (
        f"{part} gives a {type(leaf).__name__}, in which tensors are not found: let it give tensors, tuples, dicts, or "
        "a class that torch.utils._pytree.register_dataclass or register_pytree_node has made known"
    )


def _hides_tensors(leaf: Any) -> bool:
    """True if an object that torch takes for a constant has tensors."""
    return any(isinstance(each, Tensor) for each in tree_leaves(dict(getattr(leaf, "__dict__", {}))))

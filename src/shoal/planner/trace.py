"""What one microbatch of a model does, part by part, from one run of it on fake tensors: each distinct part is traced
once, and repeated blocks stand in for themselves by tensors of the same shapes.

Operations are counted as they are called: products by torch's formulas and those of `report.flops` (attention on a
CPU, causal masks by half), everything else by the bytes that it reads and writes. What backward keeps is what the
engine's own hooks see, and what travels is what the groups of a silent world book.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from shoal.chunks import Gather
from shoal.comm.ledger import Traffic, class_of
from shoal.errors import UserError
from shoal.module.batchnorm import RunningStatistics
from shoal.parallel.expert import mixtures
from shoal.pipeline.units import Unit, units_of
from shoal.planner.alike import alike, kind_of, outline
from shoal.planner.counts import Counts
from shoal.planner.dry_run import run
from shoal.planner.elements import elements_of, parameters_of, shared_among
from shoal.planner.positions import Positions, positions_of
from shoal.planner.prepare import Prepared, Subject, blank, in_one_line, prepared
from shoal.planner.temporaries import Lives, lives


@dataclass(frozen=True)
class Seen:
    """What a forward of one part does with one microbatch, on one rank.

    - `name`, `is_block`; `kind`: equal for parts that are alike
    - `products`, `convolutions`: operations of matrix products and convolutions, and of the latter alone
    - `attention`: operations of attention, causal masks by half
    - `touched`: bytes that all other operations read and write
    - `calls`: number of operations
    - `results`, `attended`, `convolved`: bytes of the results of matrix products, of attention and of convolutions,
      which selective recompute can keep beside the inputs
    - `saved`: bytes that backward keeps; `given`: bytes of the inputs that have gradients, which is
      what stays under full recompute, and what travels between stages
    - `packed`: number of tensors that forward keeps for backward, weights among them
    - `operands`: bytes that products and attention read and write
    - `last`: those of `products` that come after the last tensor that backward keeps: they are not computed again
    - `multiplied`: number of products
    - `fused`, `kernels`: what is left of `touched` and of `calls` where it is compiled
    - `sent`: calls and bytes by (operation, purpose) in the forward; `sent_last`: those that come after the last tensor
      that backward keeps; `returned`: bytes by purpose in the backward
    """

    name: str
    is_block: bool
    kind: str
    products: float
    convolutions: float
    attention: float
    touched: float
    calls: int
    results: int
    attended: int
    convolved: int
    operands: int
    last: float
    multiplied: int
    fused: int
    kernels: int
    saved: int
    given: int
    packed: int
    sent: dict[tuple[str, str], Traffic]
    sent_last: dict[tuple[str, str], Traffic]
    returned: dict[str, int]


class Statistics(NamedTuple):
    """Layers that have running statistics of batches (BatchNorm), and how many numbers these are."""

    layers: int = 0
    numbers: int = 0


@dataclass(frozen=True)
class Trace:
    """A microbatch of a model: its parts in order, and what lives beside what backward keeps. `weights`: elements of
    each part's parameters on this rank, `trained` those that have gradients, `experts` those of them in stacked
    experts, `largest` those of its largest parameter; `tensors`: its parameters that have gradients. `tied`: elements
    that parts share on this rank, all but once, `tied_trained` those of them that have gradients; `whole`: elements of
    the whole model, where tied ones count once; `statistics`: those of batches; `positions`: tables of learned
    positions; `num_experts`: what ranks have to divide which share the experts of all its mixtures, 0 without
    any, as where they share them already."""

    parts: tuple[Seen, ...]
    weights: tuple[int, ...]
    trained: tuple[int, ...]
    experts: tuple[int, ...]
    largest: tuple[int, ...]
    tensors: tuple[int, ...]
    lives: Lives[int]
    tied: int
    tied_trained: int
    whole: int
    statistics: Statistics
    positions: tuple[Positions, ...] = ()
    num_experts: int = 0


def trace(subject: Subject) -> Trace:
    """Traces one microbatch of `subject`, without stages. Raises UserError for a model that cannot be run or cut so."""
    with in_one_line(), _quiet():
        try:
            return _made(subject, True)
        except _StoodIn:  # what the model looks for, such as what a block leaves on itself, is not there then
            return _made(subject, False)


class _StoodIn(Exception):
    """Raised where a model cannot be run with tensors in place of what blocks that are alike would give."""


def _made(subject: Subject, stand_in: bool) -> Trace:
    """`stand_in`: whether blocks that are alike are run once."""
    built = blank(subject.factory)
    units = units_of(built.module)
    with prepared(built, subject) as ready:
        looker = _Looker(ready, units, stand_in)
        try:
            return _trace(looker, ready, units, subject)
        except (UserError, DataDependentOutputException, DynamicOutputShapeException):
            raise
        except Exception as error:  # somebody else's code
            if looker.stood_in:
                raise _StoodIn from error
            raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, torch does not log the traceback of an operation that fails on fake tensors; the error says enough."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _trace(looker: _Looker, ready: Prepared, units: Sequence[Unit], subject: Subject) -> Trace:
    events = run(ready, subject, looker.through)
    sizes = {name: parameter.nbytes for name, parameter in ready.local.module.named_parameters()}
    parts = parameters_of(ready.local.module, units)
    shared = shared_among(ready.local.module, parts)
    tied, tied_trained = (sum(each) for each in zip((0, 0), *shared.values(), strict=True))
    numbers = [elements_of(ready, own) for own in parts]
    weights, trained, experts, largest, tensors = zip(*numbers, strict=True) if numbers else ((),) * 5
    own = weights, trained, experts, largest, tensors, lives(events, sizes, shared.keys())
    running = RunningStatistics(ready.local.module)
    statistics = Statistics(len(running), running.numel)
    ends = tied, tied_trained, ready.whole, statistics, positions_of(ready.local.module, units, subject.sample)
    num_experts = gcd(*(each.number for each in mixtures(ready.local.module)))
    return Trace(tuple(looker.found), *own, *ends, num_experts)


_SAVED, _GIVEN, _PACKED, _KIND = range(13, 17)
"""Places of the sums of a unit behind those of Counts."""


class _Looker:
    """Attributes what a dry run shows to `units`; what is done between two of them counts for the first. `stand_in`:
    see `_made`; `stood_in`: whether any has been."""

    def __init__(self, ready: Prepared, units: Sequence[Unit], stand_in: bool) -> None:
        self.found: list[Seen] = []
        self._stand_in, self.stood_in = stand_in, False
        self._ready, self._units, self._counts = ready, units, Counts()
        self._known: dict[str, Any] = {}
        self._at, self._open = 0, False
        for place, unit in enumerate(units):
            if unit.is_block:  # also where the model calls its forward, as SqueezeBert does
                unit.module.forward = partial(self._forward, place, unit, unit.module.forward)
            else:
                unit.module.register_forward_pre_hook(partial(self._enter, place), with_kwargs=True)

    def through(self, log: list[Any], forward: Callable[[], Tensor], passing: Gather) -> None:
        """Forward, whose events come to `log`, and backward."""
        self._log, self._read, self._heard, self._at = log, 0, 0, 0
        self._sums: list[list[Any]] = [[*[0] * _KIND, ""] for _ in self._units]
        self._sent: list[dict[tuple[str, str], Traffic]] = [{} for _ in self._units]
        self._last: list[dict[tuple[str, str], Traffic]] = [{} for _ in self._units]
        self._returned: list[dict[str, int]] = [{} for _ in self._units]
        self._known.clear()
        self._open, self._counts.log = True, log
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)  # those of the dry run

        def packed(tensor: Tensor) -> Any:
            self._sums[self._at][_PACKED] += 1
            return pack(tensor)

        with self._counts, self._hearing(), torch.autograd.graph.saved_tensors_hooks(packed, unpack):
            objective = forward()
        self._note()
        self._open = False
        self.found = [
            Seen(unit.name, unit.is_block, sums[_KIND] or unit.name, *sums[:_KIND], *sent)
            for unit, sums, *sent in zip(self._units, self._sums, self._sent, self._last, self._returned, strict=True)
        ]
        first: dict[str, Seen] = {}
        for seen in self.found:
            first.setdefault(seen.kind, seen)
        self.found = [replace(first[seen.kind], name=seen.name) for seen in self.found]
        self._ready.local.randomness.replay()
        self._at = len(self._units) - 1
        with self._hearing():
            objective.backward()

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Hears of what is sent inside, and notes it for the part that runs, but for objects, by which ranks compare a
        first forward."""
        ledger = self._ready.world.ledger
        count = ledger.count

        def heard(group: str, operation: str, purpose: str, payload: int, wire: int) -> None:
            count(group, operation, purpose, payload, wire)
            if purpose == "object":
                return
            key = operation, class_of(purpose)
            if not self._open:
                returned = self._returned[self._at]
                returned[key[1]] = returned.get(key[1], 0) + payload
                return
            self._forget_kept()
            for sums in (self._sent[self._at], self._last[self._at]):
                sums[key] = sums.get(key, Traffic()) + Traffic(1, payload, wire)

        ledger.count = heard  # type: ignore[method-assign]
        try:
            yield
        finally:
            del ledger.count

    def _forget_kept(self) -> None:
        """What was sent before the last tensor that backward keeps is sent again where the part is computed again."""
        new, self._heard = self._log[self._heard :], len(self._log)
        if any(what == "saved" for what, _ in new):
            self._last[self._at].clear()

    def _enter(self, place: int, module: Any, args: Any, kwargs: Any) -> None:
        if self._open:
            self._note()
            self._at = place
            tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
            given = [each for each in tensors if each.requires_grad]
            self._sums[place][_GIVEN] += sum(each.nbytes for each in given)
            for each in given:
                each.register_hook(partial(self._leave, place))

    def _leave(self, place: int, gradient: Tensor) -> None:
        """Backward has gone through a part: what comes belongs to those before it."""
        self._at = min(self._at, max(0, place - 1))

    def _forward(self, place: int, unit: Unit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a block, or, where one like it has run, tensors of the same shapes."""
        if not self._open:
            return forward(*args, **kwargs)
        self._enter(place, unit.module, args, kwargs)
        key = kind_of(unit, (args, kwargs))
        self._sums[self._at][_KIND] = key
        if key in self._known and self._stand_in:
            self.stood_in = True
            return alike(self._known[key], (args, kwargs))
        out = forward(*args, **kwargs)
        self._known[key] = outline(out)
        return out

    def _note(self) -> None:
        """What has come since the last time belongs to the part that ran."""
        sums, counts = self._sums[self._at], self._counts
        if counts.kept():  # what the last product gives is needed
            counts.last = 0.0
        self._forget_kept()
        events, self._read = self._log[self._read :], len(self._log)
        for place, value in enumerate(counts.all):
            sums[place] += value
        sums[_SAVED] += sum(value for what, value in events if what == "saved")
        counts.clear()

"""What each part of a model takes, and the cut into stages that follows: by counted operations, or by the time that
they take here, within the memory of a rank.

A dry run of the whole model says what each part is called with, what its products cost and what it keeps for backward.
Where times are wanted, each part is then run alone, with weights and inputs of the same shapes and dtypes: the model as
a whole is never held, and parts that are alike (the blocks of most models) are timed once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from shoal.chunks import Gather
from shoal.device import is_accelerator, synchronize
from shoal.errors import UserError, did_you_mean
from shoal.module.printed import printed
from shoal.optim.groups import OptimizerFactory
from shoal.pipeline import Schedule, balance, given_stages, kept, schedule_of, steady
from shoal.pipeline.units import Unit, pieces_of, stages_of, units_of
from shoal.plan import Plan, nbytes, option_name, option_parameters
from shoal.planner.dry_run import run
from shoal.planner.predict import Machine, predict
from shoal.planner.prepare import Prepared, Subject, blank, in_one_line, prepared
from shoal.planner.recording import Recording
from shoal.planner.shapes import Shape, shapes_of, tensors_of

ROUNDS = 5
WAYS = ("counted", "measured")


@dataclass(frozen=True)
class Part:
    """What one microbatch takes of a part: forward and backward, in seconds where they are `measured`, else in
    operations (backward twice those of forward, three times of blocks under recompute = "full"); bytes that backward
    keeps; and bytes that a rank which has the part keeps all the time (weights, gradients, masters, optimizer
    state)."""

    name: str
    forward: float
    backward: float
    saved: int
    resting: int


@dataclass(frozen=True)
class _Call:
    args: Any
    kwargs: Any


def parts_of(subject: Subject, optimizer: OptimizerFactory, measured: bool, device: torch.device) -> list[Part]:
    """Finds the parts of the model on a rank of `subject.plan`, whatever stages it will have, in the order in which the
    model calls them. Raises UserError for a model that cannot be cut or run."""
    if measured and is_accelerator(device) and subject.plan.forwards_meet:
        raise UserError(
            'plan.stages = "measured" with tp, cp or ep: parts that communicate are not timed alone on a GPU; take '
            '"counted"'
        )
    with in_one_line():
        built = blank(subject.factory)
        units = units_of(built.module)
        with prepared(built, subject) as ready:
            seen = _Seen(ready, units)
            run(ready, subject, seen.through)
            resting = [_resting(ready, unit, subject, optimizer) for unit in units]
            recompute = ready.local.recompute
            again = {id(block) for block in recompute.whole} if recompute is not None else set()
        times = [
            (flops, (2.0 + (id(unit.module) in again)) * flops) for flops, unit in zip(seen.flops, units, strict=True)
        ]
        if measured:
            times = _times(units, seen.calls, device)
    return [
        Part(unit.name, *each, saved, rest)
        for unit, each, saved, rest in zip(units, times, seen.saved, resting, strict=True)
    ]


def with_stages(
    plan: Plan, subject: Subject, optimizer: OptimizerFactory, microbatches: int, device: torch.device
) -> Plan:
    """`plan` with numbers of blocks for `plan.stages` = "counted" or "measured", or a table with that name and the
    `memory` of a rank ("8GiB"); other plans as they are. `microbatches`: of a rank in a step. Times are those of this
    machine: where ranks cut alike, one asks and tells the others. UserError where no cut leaves stages within that
    memory."""
    if not isinstance(plan.stages, str | Mapping):
        return plan
    name, parameters = option_name(plan.stages, "stages"), option_parameters(plan.stages)
    if name not in WAYS:
        raise UserError(
            f'plan.stages = "{name}": give "counted", "measured", numbers of blocks or names of '
            f"parts.{did_you_mean(name, list(WAYS))}"
        )
    if unknown := parameters.keys() - {"memory"}:
        raise UserError(f'plan.stages = "{name}" has no parameter {", ".join(sorted(unknown))}; it has memory')
    limit = nbytes(parameters["memory"], "plan.stages.memory") if "memory" in parameters else math.inf
    parts = parts_of(subject, optimizer, name == "measured", device)
    return replace(plan, stages=cut(parts, units_of(blank(subject.factory).module), steady(plan, microbatches), limit))


def cut(parts: Sequence[Part], units: Sequence[Unit], schedule: Schedule, limit: float = math.inf) -> list[int]:
    """How many blocks each stage of `schedule` has: the slowest as fast as can be, and none with more than its share of
    `limit` bytes of a rank, what is kept for the microbatches that the schedule has under way there among them."""
    known = {part.name: part for part in parts}
    pieces = [[known[unit.name] for unit in piece.units] for piece in pieces_of(units)]
    cuts = balance(
        [sum(part.forward + part.backward for part in piece) for piece in pieces],
        schedule.stages,
        sizes=[sum(part.resting for part in piece) for piece in pieces],
        kept=[sum(part.saved for part in piece) for piece in pieces],
        under_way=under_way(schedule),
        limit=limit / schedule.chunks,
    )
    return [len(each) for each in cuts]


def as_cut(factory: Callable[[], nn.Module], plan: Plan) -> list[int] | None:
    """How many blocks each stage has as an engine cuts the model for `plan`; None where that is not between blocks with
    the parts around them. Raises UserError for a cut that does not fit the model."""
    units = units_of(blank(factory).module)
    stages = schedule_of(plan, 1).stages
    own = dict(zip((unit.name for unit in units), stages_of(units, stages, given_stages(plan)), strict=True))
    found = [{own[unit.name] for unit in piece.units} for piece in pieces_of(units)]
    numbers = Counter(stage for piece in found for stage in piece)
    whole = all(len(piece) == 1 for piece in found) and len(numbers) == stages
    return [numbers[stage] for stage in range(stages)] if whole else None


def under_way(schedule: Schedule) -> list[int]:
    """Returns the most microbatches that each stage has between forward and the end of their backward."""
    orders = [schedule.orders[schedule.rank_of(stage)] for stage in range(schedule.stages)]
    return [max(now[stage] for now in kept(order)) for stage, order in enumerate(orders)]


_FLASH_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch counts those of GPUs alone


def _flash_on_cpu(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


class _Seen:
    """What a dry run shows of each of `units`; what is done between two of them counts for the first."""

    def __init__(self, ready: Prepared, units: Sequence[Unit]) -> None:
        self.flops, self.saved = [0.0] * len(units), [0] * len(units)
        self.calls: list[list[_Call]] = [[] for _ in units]
        self._counter = FlopCounterMode(display=False, custom_mapping={_FLASH_ON_CPU: _flash_on_cpu})
        self._ready, self._at, self._open = ready, 0, False
        for place, unit in enumerate(units):
            unit.module.register_forward_pre_hook(partial(self._enter, place), with_kwargs=True)

    def through(self, log: list[Any], forward: Callable[[], Tensor], passing: Gather) -> None:
        """Forward, whose events come to `log`, and backward."""
        self._log, self._read, self._counted, self._at, self._open = log, 0, 0, 0, True
        self.flops, self.saved, self.calls = [0.0] * len(self.flops), [0] * len(self.saved), [[] for _ in self.calls]
        with self._counter:
            objective = forward()
        self._note()
        self._open = False
        self._ready.local.randomness.replay()
        objective.backward()

    def _enter(self, place: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._open:  # computed again in backward, or timed
            return
        self._note()
        self._at = place
        self.calls[place].append(_Call(shapes_of(args), shapes_of(kwargs)))

    def _note(self) -> None:
        """What has come since the last time belongs to the part that ran."""
        events, self._read = self._log[self._read :], len(self._log)
        self.saved[self._at] += sum(value for what, value in events if what == "saved")
        total = self._counter.get_total_flops()
        self.flops[self._at] += total - self._counted
        self._counted = total


def _made(values: Any, device: torch.device) -> Any:
    """Returns tensors of small random numbers, or of ones, in the place of shapes."""

    def tensor(shape: Shape) -> Tensor:
        if not shape.dtype.is_floating_point:
            return torch.ones(shape.size, dtype=shape.dtype, device=device)
        value = (torch.randn(shape.size, device=device) * 0.1).to(shape.dtype).requires_grad_(shape.wants_grad)
        return value.clone()  # no leaf: a part may write to it

    return tensors_of(values, tensor)


def _resting(ready: Prepared, unit: Unit, subject: Subject, optimizer: OptimizerFactory) -> int:
    ids = {id(parameter) for parameter in unit.module.parameters()}
    names = {name for name, parameter in ready.local.module.named_parameters() if id(parameter) in ids}
    own = tuple(each for each in ready.parameters if each[0] in names)
    if not own:
        return 0
    alone = Recording(ready.whole, own, tuple(ready.options), 0, (), stages=((0, 0),) if subject.plan.pipelined else ())
    need = predict(alone, optimizer, subject.plan, subject.precision, Machine(0, 0), 1).need
    return sum(row.nbytes for row in need.rows if row.phase == "always")


def _times(units: Sequence[Unit], calls: Sequence[Sequence[_Call]], device: torch.device) -> list[tuple[float, float]]:
    """Seconds of forward and backward of each; what is dropped, torch drops."""
    known: dict[str, tuple[float, float]] = {}
    found = []
    for unit, its in zip(units, calls, strict=True):
        shapes = [(tuple(parameter.shape), parameter.dtype) for parameter in unit.module.parameters()]
        key = repr((printed(unit.module), shapes, its))  # with the settings that modules print
        if key not in known:
            with _real(unit.module, device):
                each = [_time(unit, call, device) for call in its]
            known[key] = sum(forward for forward, _ in each), sum(backward for _, backward in each)
        found.append(known[key])
    return found


@contextmanager
def _real(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, its parameters and buffers are real ones of the same shapes."""
    before = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    for part, parameters, buffers in before:
        for name, parameter in parameters.items():
            if parameter is not None:
                value = (torch.randn(parameter.shape, device=device) * 0.02).to(parameter.dtype)
                setattr(part, name, nn.Parameter(value, requires_grad=parameter.requires_grad))
        for name, buffer in buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    try:
        yield
    finally:
        for part, parameters, buffers in before:
            for name, parameter in parameters.items():
                setattr(part, name, parameter)
            part._buffers.update(buffers)


def _time(unit: Unit, call: _Call, device: torch.device) -> tuple[float, float]:
    """Medians of a few runs, after one that is not counted."""
    samples = []
    for _ in range(1 + ROUNDS):
        args, kwargs = _made(call.args, device), _made(call.kwargs, device)
        started = _now(device)
        results = [leaf for leaf in tree_leaves(unit.module(*args, **kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(leaf, FakeTensor) for leaf in results):
            raise UserError(
                f'plan.stages = "measured": {unit.name} keeps tensors of its own that are no parameters or buffers; '
                'take "counted"'
            )
        outputs = [leaf for leaf in results if leaf.requires_grad]
        between = _now(device)
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        samples.append((between - started, _now(device) - between))
        unit.module.zero_grad()
    return statistics.median(forward for forward, _ in samples[1:]), statistics.median(
        backward for _, backward in samples[1:]
    )


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()

"""One microbatch forward and backward on fake tensors, and what happened to memory on the way.

The module goes through what the engine does to it (keyed dropout, recompute, casts at the border), its parameters are
watched by the engine's own hooks, and saved tensors are counted by the engine's own counter. The recording is by
parameter, so that any cut into chunks can be replayed from it (see `replay`). Compiled blocks are run as they are
written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shoal.chunks import Gather, Slot, Tier
from shoal.mesh import Mesh
from shoal.module.known_calls import NEW, KnownCalls
from shoal.parallel.tensor import why_one_by_one
from shoal.pipeline import given_stages, schedule_of, stages_of, units_of
from shoal.plan import option_name
from shoal.planner.finite import note_ones
from shoal.planner.prepare import Prepared, Subject, blank, in_one_line, prepared
from shoal.planner.recording import Event, Recording, Staged
from shoal.planner.stages import AllStages, agrees_of
from shoal.planner.workspace import called, with_workspace
from shoal.training.loss import sums_of

Through = Callable[[list[Event], Callable[[], Tensor], Gather], None]


def dry_run(subject: Subject) -> Recording:
    """Runs one microbatch of `subject`. Raises UserError, in one line, for a model that cannot be built or a loss that
    fails on its data."""
    if subject.plan.pipelined:
        place = Mesh(subject.plan, subject.rank, subject.plan.size).rank("pp")
        return dry_run_stages(subject).of(schedule_of(subject.plan, 1).stages_of(place))
    with in_one_line(), prepared(blank(subject.factory), subject) as ready:
        events = run(ready, subject)
        return Recording(
            ready.whole,
            tuple(ready.parameters),
            tuple(ready.options),
            ready.buffers,
            events,
            ready.sent(),
            layers=ready.local.parallelized.layers,
            agrees=agrees_of(ready.local),
            summed=ready.local.whole.summed,
        )


def dry_run_stages(subject: Subject) -> Staged:
    """Runs one microbatch of `subject` through the stages of its pipeline, each alone. Raises UserError as
    `dry_run`."""
    with in_one_line():
        built, schedule = blank(subject.factory), schedule_of(subject.plan, 1)
        units = units_of(built.module)  # of the whole model, before its layers are cut
        cut = stages_of(units, schedule.stages, given_stages(subject.plan))
        with prepared(built, subject) as ready:
            stages = AllStages(ready, built, schedule, units, cut)
            stages.learn(partial(loss_of, ready, subject))
            return stages.recorded(run(ready, subject, stages.through, stages.by_rank))


def run(
    ready: Prepared, subject: Subject, through: Through | None = None, ranks: Sequence[Sequence[nn.Module]] = ()
) -> tuple[Event, ...]:
    """Gives the events of a microbatch as it is once `recompute` has decided what it computes again. `through(log,
    forward, gather)`: forward and backward, where that is not the loss's; `forward()` gives the loss and what is added
    to it. `ranks`: the modules of each rank of a pipeline, which decide each for itself."""
    log: list[Event] = []
    module, recompute = ready.local.module, ready.local.recompute
    named = dict(module.named_parameters())
    watched = [SimpleNamespace(slots=[Slot(name, p.shape, 0)], data=p.detach()) for name, p in named.items()]
    gather = Gather(module, watched, _Watcher(list(named), log), [], _Log(log))  # type: ignore[arg-type]
    if recompute is not None:
        recompute.again.append(gather.again)
    for name, parameter in named.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_came, log, name))

    again = recompute is not None and option_name(subject.plan.recompute, "recompute") == "budget"
    for _ in range(1 + again):
        log.clear()
        with _Living(log, ready.calls), gather.step("dry run"):
            if through is not None:
                through(log, partial(loss_of, ready, subject), gather)
            else:
                objective = loss_of(ready, subject)
                ready.local.randomness.replay()
                objective.backward()
                del objective
            gather.backward_is_over()
        if recompute is not None:
            recompute.decide(lambda chosen: chosen, ranks)
    return tuple(log)


def loss_of(ready: Prepared, subject: Subject) -> Tensor:
    """Computes the loss of a microbatch, with what is added to it."""
    rows, sample = subject.microbatch, subject.sample
    batch = {key: torch.empty(rows, *each.shape, dtype=each.dtype) for key, each in sample.items()}
    note_ones(ready.calls, batch, sample)
    ready.local.randomness.begin(0, range(rows))
    for axis in ready.local.axes:
        with _disable_current_modes():
            axis.check_sample(subject.sample)
        batch = axis.take(batch)
    try:
        sums = sums_of(subject.loss, ready.local.module, batch, ready.local.axes)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if why := why_one_by_one(ready.local.module):
            error.add_note(why)
        raise
    return sum(sums.aux.values(), sums.total)


def _came(log: list[Event], name: str, parameter: Tensor) -> None:
    log.append(("came", name))
    parameter.grad = None  # as the engine takes it into its chunk


class _Log(Tier):
    """A tier without end that notes what backward keeps."""

    def __init__(self, log: list[Event]) -> None:
        super().__init__("dry run")
        self._log = log

    def take(self, role: str, size: int, what: str = "") -> None:
        super().take(role, size, what)
        self._log.append(("saved", size))

    def give(self, role: str, size: int) -> None:
        super().give(role, size)
        self._log.append(("saved", -size))


class _Watcher:
    """Stands in for an Executor: notes which parameters are used together, and moves nothing."""

    def __init__(self, names: list[str], log: list[Event]) -> None:
        self._names, self._log, self.active = names, log, False

    def begin(self, _: Any) -> None:
        self.active = True

    def end(self) -> None:
        self.active = False

    def forget(self) -> None:
        self.active = False

    def use(self, wanted: Iterable[int]) -> None:
        self._log.append(("use", frozenset(self._names[place] for place in wanted)))


class _Living(TorchDispatchMode):
    """Notes the bytes of storages that operations make, as they come and go."""

    def __init__(self, log: list[Event], calls: KnownCalls) -> None:
        super().__init__()
        self._log, self._calls = log, calls
        self._known: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of all calls: autograd asks each tensor for it
            return args[0].device
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs or {}))}
        out = self._calls.recall(func, args, kwargs or {})
        out = with_workspace(func, args, called(func, args, kwargs or {}) if out is NEW else out)
        for each in _tensors(out):
            storage = each.untyped_storage()
            place, size = storage._cdata, storage.nbytes()
            if place not in self._known and place not in given:
                self._known.add(place)
                self._log.append(("live", size))
                weakref.finalize(storage, self._gone, place, size).atexit = False
        return out

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._log.append(("live", -size))


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yields the tensors of an operation's arguments or results."""
    if isinstance(values, Tensor):
        if values.layout is torch.sparse_coo:  # rows of an embedding's gradient
            yield from (values._indices(), values._values())
        else:
            yield values
    elif isinstance(values, list | tuple | Mapping):
        for each in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(each)

"""One microbatch forward and backward on fake tensors, where nothing is computed and nothing allocated, and what happened to memory on the way.

The module goes through what the engine does to it (keyed dropout, recompute, casts at the border), its parameters are watched by the engine's own
hooks, and saved tensors are counted by the engine's own counter. The recording is by parameter, so that any cut into chunks can be replayed from it
(see `replay`). Compiled blocks are run as they are written.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.chunks import Passing, Slot, Tier
from shoal.chunks.assign import Described
from shoal.chunks.make import described, groups_of
from shoal.comm.silent import SilentWorld
from shoal.errors import ShoalError, UserError
from shoal.mesh import Mesh
from shoal.module.build import Built, build
from shoal.module.compiling import blocks, nothing_to_recompute, recomputable
from shoal.module.random import Randomness, attention, keyed_functional
from shoal.module.recompute import Recompute
from shoal.optim.optimizer import GroupRule, group_options
from shoal.parallel.parallelized import Parted
from shoal.parallel.tensor import CutLayers, Rules, check_rules
from shoal.plan import Plan, option_name
from shoal.planner.stages import OwnStages
from shoal.planner.workspace import with_workspace
from shoal.precision import Precision, cast_at_the_border
from shoal.training.loss import Loss, call_loss

Event = tuple[Literal["saved", "live"], int] | tuple[Literal["use"], frozenset[str]] | tuple[Literal["came"], str]
"""Bytes more or less (saved for backward; of all tensors but parameters), parameters that are used together from now on, one whose gradient has come."""

Through = Callable[[list[Event], Callable[[], Tensor], Passing], None]


@dataclass(frozen=True)
class Subject:
    """A model with all that decides what a microbatch of it needs on `rank` of `plan`. `sample`: one row of the data, `microbatch` of them a forward."""

    factory: Callable[[], nn.Module]
    loss: Loss
    sample: Mapping[str, Tensor]
    microbatch: int
    precision: Precision
    plan: Plan = field(default_factory=Plan)
    param_groups: GroupRule | None = None
    tensor_rules: Rules | None = None
    rank: int = 0


@dataclass(frozen=True)
class Recording:
    """Of a dry run: of the model `num_parameters` in all; the parameters, as the rank has them, in the order in which chunks are cut, each
    optimizer group's options, bytes of the buffers, the events in order, and bytes of payload to and from other ranks in forward and backward, by purpose. `stages`: those
    that the rank has, each with the bytes that backward keeps of one microbatch; `layers`: what plan.tp and plan.ep made of each layer."""

    num_parameters: int
    parameters: tuple[Described, ...]
    options: tuple[dict[str, Any], ...]
    buffers: int
    events: tuple[Event, ...]
    sent: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[tuple[int, int], ...] = ()
    layers: CutLayers = field(default_factory=CutLayers)

    @property
    def activations(self) -> int:
        """The most bytes that autograd keeps of one microbatch at a time."""
        return self._most("saved")

    @property
    def temporaries(self) -> int:
        """By how much the most of all tensors together, new gradients and results that die at once among them, is above `activations`."""
        return max(0, self._most("live") - self.activations)

    def _most(self, kind: str) -> int:
        now = most = 0
        for what, value in self.events:
            if what == kind:
                now += value  # type: ignore[operator]
                most = max(most, now)
        return most


def dry_run(subject: Subject) -> Recording:
    """Raises UserError, in one line, for a model that cannot be built or a loss that fails on its data."""
    with in_one_line():
        return _record(build(subject.factory, 0), subject)


@contextmanager
def in_one_line() -> Iterator[None]:
    """Errors of somebody else's code, which has been run on fake tensors, are UserErrors."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:  # somebody else's code; torch's traces of fake tensors have many lines
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"the model cannot be run without computing it ({type(error).__name__}): {reason}") from error


def _record(built: Built, subject: Subject) -> Recording:
    place = Mesh(subject.plan, subject.rank, subject.plan.size).rank("pp")
    with prepared(built, subject) as ready:
        parameters, stages = ready.parameters, None
        if subject.plan.pp > 1:
            stages = OwnStages(ready, built, subject.plan, place)
            stages.learn(partial(_loss, ready, subject))
            names = stages.names
            parameters = [each for each in parameters if each[0] in names]
        events = run(ready, subject, None if stages is None else stages.through)
        kept = () if stages is None else tuple(stages.kept.items())
        buffers = ready.buffers if stages is None else stages.buffers
    sent: dict[str, int] = {}
    for flow, traffic in ready.world.ledger.traffic.items():
        sent[flow.purpose] = sent.get(flow.purpose, 0) + traffic.payload
    return Recording(ready.whole, tuple(parameters), tuple(ready.options), buffers, events, sent, kept, ready.parted.layers)


@dataclass(frozen=True)
class Prepared:
    """A module as the engine would have it on a rank, of fake tensors. `whole`: its parameters before it was cut; `buffers`: bytes."""

    module: nn.Module
    randomness: Randomness
    world: SilentWorld
    parted: Parted
    recompute: Recompute | None
    parameters: list[Described]
    options: list[dict[str, Any]]
    whole: int
    buffers: int


@contextmanager
def prepared(built: Built, subject: Subject) -> Iterator[Prepared]:
    """Inside, all tensors are fake."""
    module = built.module
    whole = sum(parameter.numel() for parameter in module.parameters())
    member_options, member = group_options(module.named_parameters(), subject.param_groups)
    modes = (each.fake_mode for each in (*module.parameters(), *module.buffers()) if isinstance(each, FakeTensor))
    mode = next(modes, None) or FakeTensorMode()
    mode.allow_non_fake_inputs = True
    randomness, world = Randomness(0, torch.device("cpu")), SilentWorld(subject.rank, subject.plan.size)
    check_rules(built.module, subject.tensor_rules or {})
    parted = Parted(built, subject.plan, Mesh(subject.plan, world.rank, world.size), world, subject.tensor_rules, attention)
    if parted.context is not None:
        randomness.attend = parted.context.attend
    if parted.parts is not None:
        randomness.part = parted.parts
    parameters = described(module, member, subject.precision, groups_of(parted.layouts))
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(mode)
        _put_fakes(module, parameters, subject.precision)
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        randomness.take_over(module, [block for block in blocks(module) if block is not module])
        stack.enter_context(keyed_functional(randomness))
        recompute = None
        if option_name(subject.plan.recompute, "recompute") != "none":
            parts = recomputable(module)
            if not parts and subject.plan.pp == 1:
                raise nothing_to_recompute()
            recompute = Recompute(parts, subject.plan.recompute, [randomness.again])
        cast_at_the_border(module, subject.precision)
        module.train()
        yield Prepared(module, randomness, world, parted, recompute, parameters, member_options, whole, buffers)


def _put_fakes(module: nn.Module, parameters: Iterable[Described], precision: Precision) -> None:
    """Parameters and buffers become fakes of the dtypes that the module sees, tied ones in all their places."""
    dtypes = {name: key.dtype for name, _, key in parameters}
    fakes: dict[int, nn.Parameter] = {}
    for name, before in list(module.named_parameters(remove_duplicate=False)):
        if id(before) not in fakes:
            fakes[id(before)] = nn.Parameter(torch.empty(before.shape, dtype=dtypes[name]), requires_grad=before.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, fakes[id(before)])
    for owner_module in module.modules():
        for name, buffer in owner_module._buffers.items():
            if buffer is not None:
                dtype = precision.buffer_dtype(buffer, owner_module, name not in owner_module._non_persistent_buffers_set)
                owner_module._buffers[name] = torch.empty(buffer.shape, dtype=dtype)


def run(ready: Prepared, subject: Subject, through: Through | None = None) -> tuple[Event, ...]:
    """The events of a microbatch as it is once `recompute` has decided what it computes again. `through(log, forward, passing)`: forward and backward, where that is not the
    loss's; `forward()` gives the loss and what is added to it."""
    log: list[Event] = []
    module, recompute = ready.module, ready.recompute
    named = dict(module.named_parameters())
    watched = [SimpleNamespace(slots=[Slot(name, p.shape, 0)], data=p.detach()) for name, p in named.items()]
    passing = Passing(module, watched, _Watcher(list(named), log), [], _Log(log))  # type: ignore[arg-type]
    if recompute is not None:
        recompute.again.append(passing.again)
    for name, parameter in named.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_came, log, name))

    again = recompute is not None and option_name(subject.plan.recompute, "recompute") == "budget"
    for _ in range(1 + again):
        log.clear()
        with _Living(log), passing.step("dry run"):
            if through is not None:
                through(log, partial(_loss, ready, subject), passing)
            else:
                objective = _loss(ready, subject)
                ready.randomness.replay()
                objective.backward()
                del objective
            passing.backward_is_over()
        if recompute is not None:
            recompute.decide(lambda chosen: chosen)
    return tuple(log)


def _loss(ready: Prepared, subject: Subject) -> Tensor:
    """Of a microbatch, with what is added to it."""
    batch = {key: torch.empty(subject.microbatch, *each.shape, dtype=each.dtype) for key, each in subject.sample.items()}
    ready.randomness.begin(0, range(subject.microbatch))
    context = ready.parted.context
    sums = call_loss(subject.loss, ready.module, batch if context is None else context.cut(batch))
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
    """In the place of an Executor: notes which parameters are used together, and moves nothing."""

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

    def __init__(self, log: list[Event]) -> None:
        super().__init__()
        self._log = log
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = with_workspace(func, args, func(*args, **(kwargs or {})))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                place, size = storage._cdata, storage.nbytes()
                if place not in self._known and place not in given:
                    self._known.add(place)
                    self._log.append(("live", size))
                    weakref.finalize(storage, self._gone, place, size).atexit = False
        return out

    def _gone(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._log.append(("live", -size))

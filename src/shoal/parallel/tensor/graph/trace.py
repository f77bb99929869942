"""One forward of a module on fake tensors, as a list of operations and of calls of modules.

In inference mode an operation arrives as it was written (a linear layer, a matrix product, attention), not as the
kernels into which autograd would take it apart. Control flow is what it is for these inputs; where it asks for a value,
which fake tensors do not have, it finds zero.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shoal.module.attributes import contents_put_back
from shoal.module.grouped import called
from shoal.module.kept_outside import forgetting, nothing_kept_outside
from shoal.module.random import host_draws
from shoal.module.record import ONE_AT_A_TIME, storage_of
from shoal.module.value_checks import values_unchecked


@dataclass
class Call:
    """A call of a module.

    above: the call inside which it happened; None for the first one
    """

    name: str
    module: nn.Module
    above: Call | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    ops: list[Op] = field(default_factory=list)

    def inside(self, other: Call) -> bool:
        """True if it is `other` or happened inside it."""
        call: Call | None = self
        while call is not None:
            if call is other:
                return True
            call = call.above
        return False


@dataclass
class Op:
    """An operation; `call`: the innermost call of a module in which it happened."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    call: Call

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    @cached_property
    def inputs(self) -> list[Tensor]:
        return [each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, Tensor)]

    @cached_property
    def outputs(self) -> list[Tensor]:
        return [each for each in tree_leaves(self.result) if isinstance(each, Tensor)]

    def bound(self) -> dict[str, Any]:
        """Returns its arguments by the names of the operation's schema, with defaults."""
        named = {each.name: each.default_value for each in self.func._schema.arguments if each.has_default_value()}
        named |= {each.name: value for each, value in zip(self.func._schema.arguments, self.args, strict=False)}
        return named | self.kwargs


@dataclass
class Trace:
    """All operations in order, and all calls; the first call is that of the traced module."""

    ops: list[Op] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


def goes_on_elsewhere(trace: Trace) -> bool:
    """Whether parts that have not run may take what the trace computes: it uses not all weights, as of a model for text
    and pictures that is tried on text, and nothing in it takes what it computes with some."""
    root, weights = trace.calls[0], {id(each) for each in trace.calls[0].module.parameters() if each.dim() > 1}
    if weights <= {id(each) for op in trace.ops for each in op.inputs}:
        return False
    taken = {id(each) for each in tensors_in(root.result)}
    for op in reversed(trace.ops):
        if any(id(each) in taken for each in op.outputs):
            taken.update(id(each) for each in op.inputs)
        elif any(id(each) in weights for each in op.inputs):
            return True
    return False


class _Log(TorchDispatchMode):
    def __init__(self, trace: Trace, running: list[Call]) -> None:
        super().__init__()
        self._trace, self._running = trace, running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = called(func, args, kwargs or {})
        except DataDependentOutputException:  # a value that decides which way to go: that of zero
            result = False if func is torch.ops.aten.equal.default or args[0].dtype == torch.bool else 0
        if func.namespace != "prim":
            op = Op(func, tuple(args), dict(kwargs or {}), result, self._running[-1])
            self._trace.ops.append(op)
            op.call.ops.append(op)
        return result


def fake_mode(module: nn.Module) -> FakeTensorMode:
    """Returns the mode that the fake tensors of `module` belong to, or a new one."""
    tensors = [*module.parameters(), *module.buffers()]
    found = next((each.fake_mode for each in tensors if isinstance(each, FakeTensor)), None)
    mode = found or FakeTensorMode()
    mode.allow_non_fake_inputs = True
    return mode


def trace(name: str, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], mode: FakeTensorMode) -> Trace:
    """Runs `module`, which is called `name`, on fake tensors of `mode`; nothing of it is changed.

    Each module computes what its code keeps for the next one (a table of positions in `functools.lru_cache`): the
    operations of a call do not depend on calls before it, which differ from rank to rank.

    Raises whatever the module raises.
    """
    found, running, forget = Trace(), list[Call](), forgetting(module)
    names = {id(each): f"{name}.{inner}".strip(".") for inner, each in module.named_modules()}

    def enter(each: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        forget()
        call = Call(names[id(each)], each, running[-1] if running else None, given, named)
        found.calls.append(call)
        running.append(call)

    def leave(each: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        running.pop().result = result

    with ExitStack() as stack:
        stack.enter_context(unchanged(module))
        stack.enter_context(contents_put_back(module))
        stack.enter_context(nothing_kept_outside(module))
        stack.enter_context(values_unchecked())
        for each in module.modules():
            stack.callback(each.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(each.register_forward_hook(leave, with_kwargs=True).remove)
        stack.enter_context(torch.inference_mode())
        stack.enter_context(mode)
        stack.enter_context(_cached(mode))
        stack.enter_context(_Log(found, running))
        module(*args, **kwargs)
    return found


@contextmanager
def _cached(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, what an operation gives for tensors that look the same is found once: blocks repeat it. A mode that
    `module.build` has made does not do so by itself."""
    before, mode.cache_enabled = mode.cache_enabled, True
    try:
        yield
    finally:
        mode.cache_enabled = before


_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
          "_forward_pre_hooks_with_kwargs")  # fmt: skip
"""Where modules keep hooks on their forwards. Models of `transformers` add theirs in their first one, and note that."""


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Puts back, behind the context, what a forward changes: attributes and hooks of modules, buffers, what parameters
    are bound to, states of generators."""
    kept = [(each, dict(each.__dict__)) for each in module.modules()]
    tables = ("_parameters", "_buffers", "_modules", *_HOOKS)
    with _disable_current_modes():  # of a real parameter fake tensors are made else, and left in its place
        bound = [(parameter, parameter.data) for parameter in module.parameters()]
    inner = [(each, {table: dict(each.__dict__[table]) for table in tables}) for each, _ in kept]
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), host_draws(0):
        log = logging.getLogger("torch._subclasses.fake_tensor")
        spoke, log.disabled = log.disabled, True  # inputs that do not fit are told at length
        try:
            module.train()
            yield
        finally:
            log.disabled = spoke
            with _disable_current_modes():
                for parameter, data in bound:
                    if storage_of(parameter) != storage_of(data):
                        parameter.data = data
            for (each, before), (_, held) in zip(kept, inner, strict=True):
                each.__dict__.clear()
                each.__dict__.update(before)
                for table, values in held.items():
                    each.__dict__[table].clear()
                    each.__dict__[table].update(values)


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in a value: in lists, tuples, dicts, and in the attributes of results such as those of
    `transformers`."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [each for inner in value.values() for each in tensors_in(inner)]
    if isinstance(value, list | tuple | set):
        return [each for inner in value for each in tensors_in(inner)]
    if is_dataclass(value) and not isinstance(value, type):
        return [each for inner in fields(value) for each in tensors_in(getattr(value, inner.name))]
    return []

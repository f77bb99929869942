"""Tries modules with the parts that a rank has, on fake tensors, and finds the sizes that they keep as attributes.

A module that works on cut tensors is run again with parameters and inputs of this rank's shapes. If an operation then
gives another shape than its dims say, the module computes with a number that it keeps (`num_heads`, a hidden size): of
those that it reads the fewest are looked for that make all shapes right when they are divided by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import combinations, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from shoal.parallel.tensor.graph.dims import Atom, Dim, leaves, resolve
from shoal.parallel.tensor.graph.flow import Flow
from shoal.parallel.tensor.graph.roles import Roles
from shoal.parallel.tensor.graph.trace import Call, Op, tensors_in, trace

_MOST, _TRIES = 4, 150
"""Attributes that change together, and choices of them that are tried."""

_COPIES = frozenset(["contiguous", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy"])
_OTHERWISE = ("head", "vocabulary", "multihead")
"""Kinds of layers that compute in another way with parts than whole."""

Patches = dict[str, dict[str, int]]
"""Attributes by module; those of its configuration as `config.name`."""


class Local:
    """The shapes of tensors on a rank, of `ranks`, where the atoms `chosen` of `flow` are cut.

    patches: the attributes found so far
    """

    def __init__(self, flow: Flow, mode: FakeTensorMode, ranks: int) -> None:
        self._flow, self._mode, self._ranks = flow, mode, ranks
        self._roles, self._chosen = Roles(), frozenset[Atom]()
        self.patches: Patches = {}

    def fits(self, roles: Roles, chosen: frozenset[Atom]) -> dict[Atom, str]:
        """Tries all modules that work on cut tensors; returns the atoms for which one does not run, and why."""
        self._roles, self._chosen, self.patches = roles, chosen, {}
        wrong = self._failing(roles)
        self.patches = {} if wrong else {name: found for name, found in self.patches.items() if found}
        return wrong

    def _failing(self, roles: Roles) -> dict[Atom, str]:
        known: dict[Any, dict[str, int]] = {}
        for call in sorted(roles.zones, key=lambda each: -each.name.count(".")):
            if isinstance(call.module, nn.MultiheadAttention):
                continue
            signature = self._signature(call)
            if signature not in known:
                found = self._try(call)
                if found is None:
                    why = f"{call.name or 'the model'} ({type(call.module).__name__}) keeps sizes that are not found"
                    return dict.fromkeys(self._atoms(call), why)
                known[signature] = found
            if self.patches.setdefault(call.name, known[signature]) != known[signature]:
                return dict.fromkeys(self._atoms(call), f"{call.name} is called with tensors of several shapes")
        return {}

    def size(self, dim: Dim) -> int:
        """Returns the size of a dim on a rank."""
        found = 1
        for atom in resolve(dim):
            if atom.parts is not None:
                found *= sum(map(self.size, atom.parts))
            else:
                found *= atom.size // self._ranks if atom in self._chosen else atom.size
        return found

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(self.size(dim) for dim in self._flow.dims(tensor))

    def _atoms(self, call: Call) -> set[Atom]:
        """Returns the chosen atoms of the tensors with which operations work directly in `call`."""
        tensors = [each for op in call.ops for each in (*op.inputs, *op.outputs)]
        found = {leaf for each in tensors for dim in self._flow.dims(each) for leaf in leaves(dim)}
        return found & self._chosen or set(self._chosen)

    def _signature(self, call: Call) -> Any:
        own = {name: value for name, value in call.module.__dict__.items() if isinstance(value, int | float | str)}
        shapes = [(name, self.shape(each)) for name, each in call.module.named_parameters()]
        given = [(tuple(each.shape), self.shape(each)) for each in tensors_in((call.args, call.kwargs))]
        return type(call.module), repr(sorted(own.items())), repr(shapes), repr(given), len(call.ops)

    def _try(self, call: Call) -> dict[str, int] | None:
        """Returns the attributes that `call` needs changed; None if no change makes its shapes right."""
        wanted = self._told(op for op in self._flow.trace.ops if op.call.inside(call))
        reads: dict[str, int] = {}
        with self._with_parts(call) as (args, kwargs):
            with _watched(call.module, reads):
                if self._runs(call, args, kwargs, wanted):
                    return {}
            names = [name for name, value in reads.items() if value > 1 and value % self._ranks == 0]
            choices = (some for number in range(1, _MOST + 1) for some in combinations(names, number))
            for some in islice(choices, _TRIES):
                patch = {name: reads[name] // self._ranks for name in some}
                with patched(call.module, patch):
                    if self._runs(call, args, kwargs, wanted):
                        return patch
        return None

    def _runs(self, call: Call, args: Any, kwargs: Any, wanted: Sequence[Op]) -> bool:
        try:
            ops = self._told(trace(call.name, call.module, args, kwargs, self._mode).ops)
        except Exception:
            return False
        if [op.name for op in ops] != [op.name for op in wanted]:
            return False
        return all(
            self._groups(op) == self._groups(asked, own=True)
            and all(
                tuple(result.shape) == self._expected(asked, of)
                for result, of in zip(op.outputs, asked.outputs, strict=True)
            )
            for op, asked in zip(ops, wanted, strict=True)
        )

    def _told(self, ops: Iterable[Op]) -> list[Op]:
        """Returns the operations that are compared: no copies, which strides decide about, and not those of torch's
        attention, which runs whole here."""
        return [op for op in ops if op.name not in _COPIES and self._roles.kinds.get(op.call.name) != "multihead"]

    def _groups(self, op: Op, own: bool = False) -> int:
        """Returns the groups of channels of a norm or a convolution, which no shape shows; `own`: those of a rank."""
        given = op.bound()
        number = given.get("num_groups") or given.get("groups") or 1
        if not own or number == 1:
            return int(number)
        shape, whole = self._expected(op, op.outputs[0]), op.outputs[0].shape
        return int(number * shape[1] // whole[1])

    def _expected(self, op: Op, result: Tensor) -> tuple[int, ...]:
        """Returns the shape of a result on a rank: what comes of no parameter is a part only beside such parts."""
        part = id(result) in self._roles.parts or any(op.call is zone for zone in self._roles.zones)
        return self.shape(result) if part else tuple(result.shape)

    @contextmanager
    def _with_parts(self, call: Call) -> Iterator[tuple[Any, Any]]:
        """Gives the modules inside `call` this rank's parameters; yields this rank's inputs."""
        with ExitStack() as stack:
            for name, module in call.module.named_modules():
                full = f"{call.name}.{name}".strip(".")
                stack.enter_context(self._parts_of(full, module))
                stack.enter_context(patched(module, self.patches.get(full, {}) if module is not call.module else {}))
            for name, places in self._roles.sliced.items():
                if name != call.name and f"{name}.".startswith(f"{call.name}." if call.name else ""):
                    inner = call.module.get_submodule(name.removeprefix(call.name).strip("."))
                    hook = inner.register_forward_pre_hook(_narrowing(places, self), with_kwargs=True)
                    stack.callback(hook.remove)
            with self._mode:
                own = self._roles.sliced.get(call.name, {})
                yield tree_map_only(Tensor, lambda each: self._given(each, own), (call.args, call.kwargs))

    def _given(self, tensor: Tensor, sliced: Mapping[int, Tensor]) -> Tensor:
        part = id(tensor) in self._roles.parts or any(each is tensor for each in sliced.values())
        return torch.empty(self.shape(tensor), dtype=tensor.dtype) if part else tensor

    @contextmanager
    def _parts_of(self, name: str, module: nn.Module) -> Iterator[None]:
        before = dict(module._parameters), dict(module._buffers)
        if not any(self._roles.kinds.get(each) in _OTHERWISE for each in (name, name.rpartition(".")[0])):
            with self._mode:
                for key, each in before[0].items():
                    if each is not None and self.shape(each) != tuple(each.shape):
                        own = torch.empty(self.shape(each), dtype=each.dtype)
                        module._parameters[key] = nn.Parameter(own, requires_grad=each.requires_grad)
                for key in self._roles.buffers.get(name, ()):
                    old = before[1][key]
                    assert old is not None
                    module._buffers[key] = torch.empty(self.shape(old), dtype=old.dtype)
        try:
            yield
        finally:
            module._parameters.update(before[0])
            module._buffers.update(before[1])


def _narrowing(places: Mapping[int, Tensor], local: Local) -> Any:
    """Returns a hook that gives a module tensors of a rank's shapes in some places."""

    def narrow(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = tensors_in((args, kwargs))
        chosen = {id(given[at]): local.shape(whole) for at, whole in places.items()}
        return tree_map_only(
            Tensor, lambda each: each.new_empty(chosen[id(each)]) if id(each) in chosen else each, (args, kwargs)
        )

    return narrow


@contextmanager
def patched(module: nn.Module, patch: Mapping[str, int]) -> Iterator[None]:
    """Sets attributes of a module inside the context (see `set_attributes`)."""
    before = dict(module.__dict__)
    set_attributes(module, patch)
    try:
        yield
    finally:
        module.__dict__.update(before)


def set_attributes(module: nn.Module, patch: Mapping[str, int]) -> None:
    """Sets attributes of a module; those named `config.name` in a copy of its configuration."""
    of_config = {name.removeprefix("config."): value for name, value in patch.items() if name.startswith("config.")}
    if of_config:
        module.__dict__["config"] = copy(module.__dict__["config"])
    for name, value in of_config.items():
        setattr(module.__dict__["config"], name, value)
    for name, value in patch.items():
        if not name.startswith("config."):
            module.__dict__[name] = value


@contextmanager
def _watched(module: nn.Module, reads: dict[str, int]) -> Iterator[None]:
    """Notes in `reads` the whole numbers that are read from the module and from its configuration."""
    before, config = type(module), module.__dict__.get("config")
    module.__class__ = _watching(before, reads, "")
    if config is not None:
        module.__dict__["config"] = copy(config)
        module.__dict__["config"].__class__ = _watching(type(config), reads, "config.")
    try:
        yield
    finally:
        module.__class__ = before
        if config is not None:
            module.__dict__["config"] = config


def _watching(of: Any, reads: dict[str, int], prefix: str) -> Any:
    def read(self: Any, name: str) -> Any:
        value = of.__getattribute__(self, name)
        if type(value) is int and not name.startswith("_"):
            reads[prefix + name] = value
        return value

    return type(of.__name__, (of,), {"__getattribute__": read})

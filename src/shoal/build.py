"""Building a model without holding it: the factory runs on fake tensors while its initialisation is recorded, and each tensor is
then computed alone, at full shape, from the operations that it depends on, seeded by its name.

So every plan starts from the same weights and no rank ever holds the whole model. Fake tensors, not the meta device: they say
that they are on the CPU, while libraries (transformers, `nn.init.orthogonal_`) skip their initialisation when they see meta. What
cannot be recorded (a constructor that reads values) is built on the CPU instead, and said so.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from shoal.errors import ArgumentError

_UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}

_ONE_AT_A_TIME = threading.Lock()
"""The default generator is the whole process's, and ranks may be threads of one (see comm.simulation)."""


@dataclass(frozen=True)
class Built:
    """A module and a way to its initial values.

    `value(tensor)` gives a parameter's or buffer's initial value on the CPU, as the factory made it; `name` seeds it. `how` is
    "recorded", "given" (a ready module) or why the factory had to be run on the CPU.
    """

    module: nn.Module
    value: Callable[[str, Tensor], Tensor]
    how: str


def build(model: nn.Module | Callable[[], nn.Module], seed: int) -> Built:
    """Builds `model`, a factory without arguments or a ready module."""
    if isinstance(model, nn.Module):
        return Built(model, lambda name, tensor: tensor.detach().cpu(), "given")
    record = _Record()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), record, _rejection_sampling_whole(record):
            module = model()
    except Exception as error:  # a constructor may fail on fake tensors in its own way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    else:
        names = {_ref(t).storage: name for name, t in reversed(_named_tensors(_made(module))) if isinstance(t, FakeTensor)}
        return Built(module, lambda name, tensor: record.replay(tensor, name, names, seed), "recorded")
    torch.manual_seed(seed)
    module = _made(model())  # if the model is wrong this raises, and says it once
    return Built(module, lambda name, tensor: tensor.detach(), f"built on CPU ({reason})")


def _made(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ArgumentError("model", f" returned a {type(module).__name__}: a factory returns the module that it made")
    return module


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def _rejection_sampling_whole(record: _Record) -> Iterator[None]:
    """`nn.init.trunc_normal_` looks at what it drew, and fake tensors have nothing to see: it is recorded as one operation."""
    original = nn.init._no_grad_trunc_normal_

    def stand_in(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, *args, **kwargs)
        with record.noting(original, (tensor, *args), kwargs) as outputs:
            outputs.append(tensor)
        return tensor

    nn.init._no_grad_trunc_normal_ = stand_in
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@dataclass(frozen=True)
class _Ref:
    """How a fake tensor lay in its storage when it was seen: in-place operations may change the object's shape later."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def within(self, base: Tensor) -> Tensor:
        """The tensor that lies in `base`'s storage as this one lay in its own."""
        return torch.empty(0, dtype=self.dtype).set_(base.untyped_storage(), self.offset, self.size, self.stride)

    def holding(self, value: Tensor) -> Tensor:
        """`value` in a storage of its own, laid out as this: CPU kernels may choose other strides than the fake ones say."""
        if value.stride() == self.stride and value.storage_offset() == self.offset:
            return value
        room = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) + 1
        return torch.zeros(room, dtype=self.dtype).as_strided(self.size, self.stride, self.offset).copy_(value)


@dataclass(frozen=True)
class _Op:
    func: Any
    args: Any
    kwargs: Any
    inputs: tuple[_Ref, ...]
    outputs: tuple[_Ref, ...]


class _Record(TorchDispatchMode):
    """The operations on fake tensors, in order, known by the storages that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self._ops: list[_Op] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._alive: list[Any] = []  # a storage is known by its address, which must not be used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.noting(func, args, kwargs or {}) as outputs:
            out = func(*args, **(kwargs or {}))
            outputs.append(out)
        return out

    @contextmanager
    def noting(self, func: Any, args: Any, kwargs: Any) -> Iterator[list[Any]]:
        """Records `func(*args, **kwargs)`, run by the block, which appends what it gave to the list."""
        seen_args, seen_kwargs = tree_map_only(FakeTensor, _ref, (args, kwargs))
        inputs = _refs((seen_args, seen_kwargs))
        results: list[Any] = []
        yield results
        outputs = _refs(tree_map_only(FakeTensor, _ref, results))
        if inputs or outputs:
            self._alive.append((args, kwargs, results))
            for storage in {ref.storage for ref in outputs} | _mutated(func, seen_args, seen_kwargs):
                self._writers[storage].append(len(self._ops))
            self._ops.append(_Op(func, seen_args, seen_kwargs, inputs, outputs))

    def replay(self, tensor: Tensor, name: str, names: Mapping[int, str], seed: int) -> Tensor:
        """The value of a fake `tensor` called `name`, on the CPU.

        An operation draws under the name of the tensor that it writes (`names`, by storage), so a copy of another parameter gets that
        one's values; what it writes on the way, without a name, under `name`.
        """
        if not isinstance(tensor, FakeTensor):
            return tensor.detach().cpu()
        wanted, real = _ref(tensor), dict[int, Tensor]()
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.no_grad():
            for position, index in enumerate(self._needed(wanted.storage)):
                own = next((ref.storage for ref in self._ops[index].outputs if ref.storage in names), None)
                site = f"{name}#{position}" if own is None else f"{names[own]}#{self._writers[own].index(index)}"
                torch.manual_seed(_seed_of(seed, site))
                _run(self._ops[index], real)
            return wanted.within(real[wanted.storage])

    def _needed(self, storage: int) -> list[int]:
        """Indices of the operations that the final content of `storage` depends on."""
        until: dict[int, int] = {}
        needed: set[int] = set()
        pending = [(storage, len(self._ops))]
        while pending:
            current, before = pending.pop()
            if until.get(current, -1) >= before:
                continue
            until[current] = before
            for index in self._writers[current]:
                if index < before and index not in needed:
                    needed.add(index)
                    pending.extend((ref.storage, index) for ref in self._ops[index].inputs)
        return sorted(needed)


def _run(op: _Op, real: dict[int, Tensor]) -> None:
    """Runs `op` on the storages in `real` and adds those that it makes."""
    args, kwargs = tree_map_only(_Ref, lambda ref: ref.within(real[ref.storage]), (op.args, op.kwargs))
    outputs = [out for out in tree_flatten(op.func(*args, **kwargs))[0] if isinstance(out, Tensor)]
    for ref, value in zip(op.outputs, outputs, strict=True):
        if ref.storage not in real:
            if op.func in _UNINITIALISED:
                value.zero_()  # never left to what the memory held: ranks would differ
            real[ref.storage] = ref.holding(value)


def _ref(tensor: Tensor) -> _Ref:
    storage = tensor.untyped_storage()._cdata
    return _Ref(storage, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _refs(tree: Any) -> tuple[_Ref, ...]:
    return tuple(leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, _Ref))


def _mutated(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Storages that an in-place or out= operation writes, by its schema; those recorded whole return what they write."""
    written: set[int] = set()
    for position, argument in enumerate(func._schema.arguments if hasattr(func, "_schema") else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written |= {ref.storage for ref in _refs(value)}
    return written

"""Records the operations of a constructor on fake tensors, and computes the value of one tensor at a time from the
operations that it depends on."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_UNINITIALISED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}

_NO_SCHEMA = SimpleNamespace(arguments=(), returns=())

ONE_AT_A_TIME = threading.RLock()
"""Guards the default generator, which belongs to the process: ranks may be threads of one (see comm.simulation)."""


class Unrecordable(Exception):
    """Raised if the initialisation of a model cannot be computed one tensor at a time; its text is the reason."""


def seed_of(seed: int, name: str) -> int:
    """Returns a 63-bit seed from `seed` and a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class _Ref:
    """The position of a fake tensor in its storage when it was seen; in-place operations may change the object's shape
    later."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def within(self, base: Tensor) -> Tensor:
        """Returns the tensor that lies in `base`'s storage as this one lay in its own."""
        return torch.empty(0, dtype=self.dtype, device=base.device).set_(
            base.untyped_storage(), self.offset, self.size, self.stride
        )

    def holding(self, value: Tensor) -> Tensor:
        """Returns `value` in a storage of its own with this layout; CPU kernels may choose other strides than the fake
        ones."""
        if value.stride() == self.stride and value.storage_offset() == self.offset:
            return value
        room = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) + 1
        return (
            torch.zeros(room, dtype=self.dtype, device=value.device)
            .as_strided(self.size, self.stride, self.offset)
            .copy_(value)
        )


@dataclass(frozen=True)
class _Op:
    """A recorded call of `func`, with references in place of fake tensors."""

    func: Any
    args: Any
    kwargs: Any
    inputs: tuple[_Ref, ...]
    outputs: tuple[_Ref, ...]


class Record(TorchDispatchMode):
    """Records the operations on fake tensors, in order, by the storages that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self._ops: list[_Op] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._alive: list[Any] = []  # storages are known by address, which must not be reused
        self._seed = torch.initial_seed()
        self._outside: set[int] = set()  # storages of views of tensors that existed before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and telling so at each call takes as long as the call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.noted(lambda: func(*args, **kwargs), func, args, kwargs)

    def noted(self, run: Callable[[], Any], func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of `run`, which is recorded as the call `func(*args, **kwargs)`."""
        given: list[Any] = []
        inputs: list[_Ref] = []
        outputs: list[_Ref] = []
        seen_args, seen_kwargs = _seen(args, given, inputs), _seen(kwargs, given, inputs)
        if torch.initial_seed() != self._seed or any(isinstance(leaf, torch.Generator) for leaf in given):
            raise Unrecordable("it sets a seed or draws from a generator of its own")
        self._seed += 1  # a new seed per operation detects a constructor that restores the generator
        torch.default_generator.manual_seed(self._seed)
        result = run()
        _seen(result, [], outputs)
        if inputs or outputs:
            self._alive.append((args, kwargs, result))
            mutated = [
                leaf
                for position, name in _written_by(func)
                for leaf in _leaves(seen_args[position] if position < len(args) else seen_kwargs.get(name))
            ]
            real = [leaf for leaf in given if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)]
            self._check_outside(func, real, mutated, outputs)
            written = [leaf for leaf in mutated if isinstance(leaf, _Ref)]
            for storage in dict.fromkeys(ref.storage for ref in (*outputs, *written)):
                self._writers[storage].append(len(self._ops))
            self._ops.append(_Op(func, seen_args, seen_kwargs, tuple(inputs), tuple(outputs)))
        return result

    def _check_outside(self, func: Any, real: list[Tensor], mutated: list[Any], outputs: Sequence[_Ref]) -> None:
        """Raises Unrecordable for a write to a tensor that existed before the factory ran: fake tensors would not carry
        it out. `real`: the tensors that existed before and are given to the operation."""
        if any(
            isinstance(leaf, Tensor) or (isinstance(leaf, _Ref) and leaf.storage in self._outside) for leaf in mutated
        ):
            raise Unrecordable("it changes tensors that were there before")
        if real and _makes_views(func) and func is not torch.ops.aten.lift_fresh.default:
            self._outside |= {ref.storage for ref in outputs}

    def makes(self, tensor: Tensor) -> bool:
        """Returns whether a recorded operation has made or written the storage of a fake `tensor`."""
        return bool(self._writers.get(storage_of(tensor)))

    def sites(self, tensors: Sequence[tuple[str, Tensor]], names: Mapping[int, str]) -> dict[int, str]:
        """Returns, by operation, the name under which it draws, for all operations that `tensors` depend on.

        An operation draws under the name of the tensor whose storage it writes (`names`); if that has none, under the
        first of `tensors` that depends on it. So a draw is the same for all of them.
        """
        found: dict[int, str] = {}
        for name, tensor in tensors:
            for position, index in enumerate(self._needed(storage_of(tensor))):
                if index not in found:
                    own = next((ref.storage for ref in self._ops[index].outputs if ref.storage in names), None)
                    site = (name, position) if own is None else (names[own], self._writers[own].index(index))
                    found[index] = f"{site[0]}#{site[1]}"
        return found

    def constants(self, operations: Iterable[int]) -> list[Tensor]:
        """Returns the real tensors that `operations` read. What others read (a library's trial) is in no tensor."""
        each = (self._ops[index] for index in sorted(operations))
        return [leaf for op in each for leaf in _leaves((op.args, op.kwargs)) if isinstance(leaf, Tensor)]

    def replay(self, tensor: Tensor, name: str, sites: Mapping[int, str], seed: int) -> Tensor:
        """Returns the value of a fake `tensor` called `name`, on the CPU; each operation draws under its site."""
        if not isinstance(tensor, FakeTensor):
            return tensor.detach().cpu()
        wanted, real = _ref(tensor), dict[int, Tensor]()
        with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]), torch.no_grad():
            for position, index in enumerate(self._needed(wanted.storage)):
                # torch.manual_seed keeps a stack trace of each call, and would change the generators of devices
                torch.default_generator.manual_seed(seed_of(seed, sites.get(index, f"{name}#{position}")))
                _run(self._ops[index], real)
            return wanted.within(real[wanted.storage])

    def _needed(self, storage: int) -> list[int]:
        """Returns the indices of the operations that the final content of `storage` depends on."""
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
    given = {leaf.untyped_storage()._cdata for leaf in _leaves((op.args, op.kwargs)) if isinstance(leaf, Tensor)}
    args, kwargs = _mapped(
        lambda leaf: leaf.within(real[leaf.storage]) if isinstance(leaf, _Ref) else leaf, (op.args, op.kwargs)
    )
    outputs = [out for out in _leaves(op.func(*args, **kwargs)) if isinstance(out, Tensor)]
    for ref, value in zip(op.outputs, outputs, strict=True):
        if ref.storage not in real:
            if op.func in _UNINITIALISED:
                value.zero_()  # the old content of memory would differ between ranks
            if value.untyped_storage()._cdata in given:
                value = value.clone()  # a constant must not be changed in place, here and by the next replay
            real[ref.storage] = ref.holding(value)


def _ref(tensor: Tensor) -> _Ref:
    return _Ref(storage_of(tensor), tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor is neither fake nor on the meta device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def storage_of(tensor: Tensor) -> int:
    """Returns the key under which a record knows the storage of `tensor`."""
    return tensor.untyped_storage()._cdata


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Returns the elements of its storage between which a tensor lies: its first, and the one behind its last."""
    first = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, int(first + last + 1)


def _seen(tree: Any, leaves: list[Any], refs: list[_Ref]) -> Any:
    """Returns an operation's arguments or results with references in place of fake tensors. Adds their leaves to
    `leaves`, the references to `refs`."""
    if type(tree) in (tuple, list):
        return type(tree)([_seen(each, leaves, refs) for each in tree])
    if type(tree) is dict:
        return {key: _seen(each, leaves, refs) for key, each in tree.items()}
    leaves.append(tree)
    if not isinstance(tree, FakeTensor):
        return tree
    refs.append(_ref(tree))
    return refs[-1]


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Changes the leaves of an operation's arguments or results, which nest in tuples, lists and dicts only: torch's
    pytrees, which know more, took half of the time of a build."""
    if type(tree) in (tuple, list):
        return type(tree)(_mapped(change, each) for each in tree)
    if type(tree) is dict:
        return {key: _mapped(change, each) for key, each in tree.items()}
    return change(tree)


def _leaves(tree: Any) -> list[Any]:
    """Returns the leaves of an operation's arguments or results, in order."""
    if type(tree) not in (tuple, list, dict):
        return [tree]
    return [leaf for each in (tree.values() if type(tree) is dict else tree) for leaf in _leaves(each)]


@cache
def _written_by(func: Any) -> list[tuple[int, str]]:
    """Returns the arguments that an in-place or out= operation writes, by its schema: their positions and names.
    Functions recorded as one operation have no schema; they return what they write."""
    return [
        (position, argument.name)
        for position, argument in enumerate(getattr(func, "_schema", _NO_SCHEMA).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@cache
def _makes_views(func: Any) -> bool:
    return any(result.alias_info is not None for result in getattr(func, "_schema", _NO_SCHEMA).returns)

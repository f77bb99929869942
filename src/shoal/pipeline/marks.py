"""Marks on tensors: the values of other stages that they are computed from, in whatever way the model does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.module.record import storage_of
from shoal.pipeline.routes import Value

READS = "the model reads, outside its parts, the value of something that another stage computes"


class Marks(TorchDispatchMode):
    """Tracks, by memory, the values of other stages that tensors are computed from.

    refusal: makes the error for a reason why a stage cannot end here
    is_last: the stage is the model's last, after which shapes may depend on values

    Attributes: `written`, the values whose own tensors were written to; `by_values`, whether any shape was made of
    values.
    """

    def __init__(self, refusal: Callable[[str], Exception], is_last: bool) -> None:
        super().__init__()
        self._refusal, self._is_last = refusal, is_last
        self._marks: dict[int, frozenset[Value]] = {}
        self._first: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # marks go by address of memory, which must not be reused
        self._is_paused = False
        self.written: set[Value] = set()
        self.by_values = False

    def mark(self, tensor: Tensor, value: Value) -> Tensor:
        self._alive.append(tensor)
        self._marks[storage_of(tensor)] = frozenset([value])
        self._first[storage_of(tensor)] = value
        return tensor

    def clear(self, tensor: Tensor) -> None:
        """Removes the marks of a tensor that a part of this stage has made; what it was made from is recorded
        already."""
        self._alive.append(tensor)
        self._marks.pop(storage_of(tensor), None)

    def of(self, tensor: Tensor) -> frozenset[Value]:
        return self._marks.get(storage_of(tensor), frozenset())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Switches tracking off in the context."""
        self.__exit__(None, None, None)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self.__enter__()

    def read(self, tensor: Tensor, how: str) -> None:
        """Sees values that the model takes out of a tensor by no operation (see module.reads)."""
        if not self._is_paused and self.of(tensor):
            raise self._refusal(READS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        marks = frozenset[Value]().union(*(self.of(each) for each in inputs))
        if func is torch.ops.aten._local_scalar_dense.default and marks:
            raise self._refusal(READS)
        by_values = torch.Tag.dynamic_output_shape in func.tags and _by_values(func, inputs)
        self.by_values |= by_values
        if marks and not self._is_last and by_values:
            raise self._refusal(
                "the shape of something between the model's parts depends on the values of what another stage computes"
            )
        if func._schema.is_mutable:
            self.written |= {self._first[storage_of(each)] for each in inputs if storage_of(each) in self._first}
        out = func(*args, **kwargs)
        if marks and isinstance(out, bool | int | float):
            raise self._refusal(READS)
        for each in _tensors(out):
            self._alive.append(each)
            if marks:
                self._marks[storage_of(each)] = self.of(each) | marks
        return out


def _by_values(func: Any, inputs: Sequence[Tensor]) -> bool:
    """True if the shape of the output of `func` depends on values; rows picked by index have the shape of the index."""
    return func is not torch.ops.aten.index.Tensor or any(
        each.dtype in (torch.bool, torch.uint8) for each in inputs[1:]
    )


def _tensors(tree: Any) -> Sequence[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

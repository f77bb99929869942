"""What a compiler would make of a part of a model: operations that are no products, and follow each other without a
product between them, are one kernel, which reads what others have made and writes what others read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass
class _Made:
    """A storage by what made it: how many products lie before it on the longest way, the kernel, None for a product or
    what comes from outside, and its bytes. `read`: whether anything has used it, `written`: whether another kernel
    did; `reads`: what of it kernels have read, by their depth."""

    depth: int
    kernel: int | None
    nbytes: int
    read: bool = False
    written: bool = False
    reads: set[tuple[Any, ...]] = field(default_factory=set)


@dataclass
class Fusion:
    """Follows operations by the storages of their tensors.

    Two operations are of one kernel where one uses what the other made and as many products lie before both. It is what
    torch's compiler does with elementwise operations and reductions; its kernels that need two passes over a row read
    the second time from a cache, which is not counted.
    """

    _made: dict[int, _Made] = field(default_factory=dict)
    _into: dict[int, int] = field(default_factory=dict)
    _read = _written = _number = _joined = 0

    @property
    def touched(self) -> int:
        """Bytes that kernels read and write; what nothing has used yet is a result of all."""
        results = sum(each.nbytes for each in self._made.values() if each.kernel is not None and not each.read)
        return self._read + self._written + results

    @property
    def kernels(self) -> int:
        """Number of kernels, those of products among them."""
        return self._number - self._joined

    def passed(self, given: Any, out: Any) -> None:
        """An operation that computes nothing: what it makes anew holds nothing yet."""
        known = set(map(_place, _tensors(given)))
        for each in _tensors(out):
            if _place(each) not in known:
                self._make(each, 0, None)

    def multiplied(self, given: Any, out: Any) -> None:
        """A product, or attention: a kernel of its own."""
        depth = 0
        for each in _tensors(given):
            made = self._of(each)
            depth = max(depth, made.depth)
            self._from_another(made)
        self._number += 1
        for each in _tensors(out):
            self._make(each, depth + 1, None)

    def fused(self, read: Any, given: Any, out: Any) -> None:
        """Any other operation, which reads `read` of what is `given`."""
        own = [(each, self._of(each)) for each in _tensors(given)]
        depth = max((made.depth for _, made in own), default=0)
        kernel = self._number
        self._number += 1
        whole = {id(each) for each in _tensors(read)}
        for each, made in own:
            if made.kernel is not None and made.depth == depth:
                made.read = True
                kernel = self._join(kernel, made.kernel)
                continue
            self._from_another(made)
            key = depth, each.storage_offset(), each.numel()
            if id(each) in whole and key not in made.reads:
                made.reads.add(key)
                self._read += min(each.nbytes, each.untyped_storage().nbytes())
        for each in _tensors(out):
            self._make(each, depth, kernel)

    def _make(self, tensor: Tensor, depth: int, kernel: int | None) -> None:
        """A new tensor, which may lie where one lay that is gone: what nothing has used was a result."""
        before = self._made.get(_place(tensor))
        if before is not None and before.kernel is not None and not before.read:
            self._written += before.nbytes
        self._made[_place(tensor)] = _Made(depth, kernel, 0 if kernel is None else tensor.nbytes)

    def _of(self, tensor: Tensor) -> _Made:
        return self._made.setdefault(_place(tensor), _Made(0, None, 0))

    def _from_another(self, made: _Made) -> None:
        """What another kernel uses has been written, once."""
        made.read = True
        if made.kernel is not None and not made.written:
            made.written = True
            self._written += made.nbytes

    def _join(self, one: int, other: int) -> int:
        """Makes one kernel of two; returns its number."""
        one, other = self._root(one), self._root(other)
        if one != other:
            self._into[one] = other
            self._joined += 1
        return other

    def _root(self, kernel: int) -> int:
        while kernel in self._into:
            kernel = self._into[kernel]
        return kernel


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

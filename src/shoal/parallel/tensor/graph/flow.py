"""Follows the dims of tensors through a trace: which dims of which tensors are the same atoms.

What an operation does to dims stands in two tables, `views.py` for those that only rearrange and `products.py` for
products, norms and reductions. Elementwise operations join the dims of their inputs. An operation of which nothing is
known blocks all dims that it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.parallel.tensor.graph.dims import Atom, Dim, block, leaves, new, resolve, unify
from shoal.parallel.tensor.graph.trace import Op, Trace


@dataclass(frozen=True)
class Use:
    """A parameter in a product, or in a lookup (`x` are the ids then).

    rows, columns: its dims that make the output's and that are summed over
    """

    op: Op
    weight: Tensor
    rows: Dim
    columns: Dim
    x: Tensor
    lookup: bool = False


Handler = Callable[["Flow", Op, dict[str, Any]], None]


class Flow:
    """The dims of all tensors of `trace`, and the products with `parameters`, which are of the traced module.

    handlers: what operations do to dims, by their names
    heads: ids of operations whose output dims are taken for something new, as those of logits, that stay cut
    """

    def __init__(
        self,
        trace: Trace,
        parameters: Sequence[Tensor],
        handlers: Mapping[str, Handler],
        heads: frozenset[int] = frozenset(),
    ) -> None:
        self.trace, self.heads, self._handlers = trace, heads, handlers
        self.parameters = {id(each): each for each in parameters}
        self.used = self.parameters.keys() & {id(each) for op in trace.ops for each in op.inputs}
        self.of: dict[int, list[Dim]] = {}
        self.uses: list[Use] = []
        self._atoms: dict[int, frozenset[Atom]] = {}
        self.views: dict[int, Tensor] = {}  # parameters by tensors that are transposed, or split off
        for op in trace.ops:
            self.follow(op)

    def dims(self, tensor: Tensor) -> list[Dim]:
        """Returns the dims of a tensor; new ones if it was not made in the trace."""
        if id(tensor) not in self.of:
            self.of[id(tensor)] = [new(length) for length in tensor.shape]
        return self.of[id(tensor)]

    def atoms(self, tensor: Tensor) -> frozenset[Atom]:
        """Returns all atoms that a tensor has, which change no more when every operation has been followed."""
        if id(tensor) not in self._atoms:
            self._atoms[id(tensor)] = frozenset(leaf for dim in self.dims(tensor) for leaf in leaves(dim))
        return self._atoms[id(tensor)]

    def put(self, tensor: Tensor, dims: Sequence[Dim] | None) -> None:
        """Sets the dims of a result, which is left alone if it is one of the inputs (computed in place)."""
        if id(tensor) in self.of:
            return
        if dims is None or [_size(dim) for dim in dims] != list(tensor.shape):
            dims = [new(length) for length in tensor.shape]
        self.of[id(tensor)] = [list(dim) for dim in dims]

    def block_all(self, op: Op) -> None:
        for tensor in op.inputs:
            for dim in self.dims(tensor):
                block(dim, op.name)
        for tensor in op.outputs:
            self.put(tensor, None)

    def join(self, op: Op, inputs: Sequence[Tensor], shape: Sequence[int]) -> list[Dim]:
        """Joins the dims of inputs that are broadcast against each other to `shape`; returns those of the result."""
        result: list[Dim] = []
        for at in range(-len(shape), 0):
            found: Dim | None = None
            for tensor in inputs:
                if tensor.dim() < -at or tensor.shape[at] == 1 != shape[at]:
                    continue
                mine = self.dims(tensor)[at]
                if found is not None:
                    unify(found, mine, op.name)
                found = mine
            result.append(new(shape[at]) if found is None else found)
        return result

    def parameter_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the parameter that `tensor` is, or is a transposed view of, or a part."""
        return self.parameters.get(id(tensor), self.views.get(id(tensor)))

    def product(self, op: Op, x: Tensor, weight: Tensor, rows: Dim, columns: Dim, inner: Dim) -> Dim:
        """Joins `inner` of `x` with the columns of `weight`, over which is summed; returns the dim of the result."""
        unify(inner, columns, op.name)
        parameter = self.parameter_of(weight)
        if parameter is None:
            block(columns, op.name)
            return rows
        self.uses.append(Use(op, parameter, rows, columns, x))
        return new(_size(rows)) if id(op) in self.heads else rows

    def follow(self, op: Op) -> None:
        """Notes the dims of the results of `op`, and joins those of its inputs as it does."""
        handler = self._handlers.get(op.name)
        if handler is not None:
            handler(self, op, op.bound())
        elif torch.Tag.pointwise in op.func.tags or op.name in _POINTWISE:
            for result in op.outputs:
                self.put(result, self.join(op, op.inputs, result.shape))
        elif not op.inputs:
            for result in op.outputs:
                self.put(result, None)
        else:
            self.block_all(op)


_POINTWISE = frozenset(
    [
        "dropout",
        "masked_fill",
        "masked_fill_",
        "where",
        "prelu",
        "relu6",
        "hardtanh",
        "silu",
        "mish",
        "softplus",
        "threshold",
        "logsigmoid",
        "hardswish",
        "hardsigmoid",
        "gelu",
        "celu",
        "selu",
        "elu",
        "glu_",
        "clamp",
        "clip",
        "addcmul",
        "addcdiv",
        "type_as",
        "to",
        "float",
        "half",
        "double",
        "bfloat16",
        "add_",
        "mul_",
        "sub_",
        "div_",
        "copy_",
        "fill_",
        "zero_",
        "relu_",
        "sigmoid_",
        "tanh_",
        "silu_",
        "hardtanh_",
        "hardswish_",
        "hardsigmoid_",
        "leaky_relu_",
        "elu_",
        "selu_",
        "relu6_",
        "dropout_",
        "logical_not",
        "bitwise_not",
        "softsign",
        "nan_to_num",
        "square",
        "rsqrt",
        "lerp",
    ]
)
"""Elementwise operations that torch has no tag on."""


def _size(dim: Dim) -> int:
    found = 1
    for atom in resolve(dim):
        found *= atom.size
    return found

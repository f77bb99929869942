"""Blocks that are alike: how they are told, and tensors in place of what another one would give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shoal.module.printed import printed
from shoal.pipeline.units import Unit


def kind_of(unit: Unit, given: Any) -> str:
    """Equal for blocks that compute alike: their settings, which modules print, their parameters, and their inputs."""
    parameters = [(name, tuple(each.shape), each.dtype) for name, each in unit.module.named_parameters()]
    return repr((type(unit.module), printed(unit.module), parameters, outline(given)))


class _Alike(torch.autograd.Function):
    """Tensors of given shapes that depend on all inputs."""

    @staticmethod
    def forward(ctx: Any, shapes: Sequence[tuple[Any, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.inputs = [(each.shape, each.dtype) for each in inputs]
        out = tuple(torch.empty(shape, dtype=dtype) for shape, dtype, _ in shapes)
        ctx.mark_non_differentiable(*(each for each, (_, _, wants) in zip(out, shapes, strict=True) if not wants))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.inputs)


def outline(values: Any) -> Any:
    """What of the tensors in `values` is equal where blocks are alike."""
    return tree_map_only(Tensor, lambda leaf: (leaf.shape, leaf.dtype, leaf.requires_grad), values)


def alike(template: Any, given: Any) -> Any:
    """Tensors of an outline that depend on all tensors in `given`."""
    inputs = [each for each in tree_leaves(given) if isinstance(each, Tensor)]
    leaves, tree = tree_flatten(template, is_leaf=_is_shape)
    shapes = [leaf for leaf in leaves if _is_shape(leaf)]
    made = iter(_Alike.apply(shapes, *inputs))
    return tree_unflatten([next(made) if _is_shape(leaf) else leaf for leaf in leaves], tree)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], torch.Size)

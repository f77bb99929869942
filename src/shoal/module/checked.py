"""What the parameters of a model have to be like, to be trained in chunks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.errors import UserError
from shoal.module.record import span_of, storage_of
from shoal.module.scripted import is_scripted


def check_trainable(module: nn.Module) -> None:
    """Raises UserError for a model that is scripted as a whole, for parameters without a shape, for complex ones, for
    sparse tensors, and for two parameters that lie in the same memory."""
    if is_scripted(module):
        raise UserError(
            "the model is a module of torch.jit as a whole, which takes no hooks: keep it in a module of your own "
            "(self.inner = scripted) and call it in that one's forward, or give the module that it was made of"
        )
    check_shapes(module)
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise UserError(
                f"the parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, and chunks hold real numbers: "
                "keep nn.Parameter(torch.view_as_real(w)) and use torch.view_as_complex(self.w) in the forward (under "
                "bf16 or fp16 of self.w.float()); what is not trained can be a buffer"
            )
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        if each.layout != torch.strided:
            raise UserError(
                f"{name} is a sparse tensor, and ranks send and save dense ones: keep its indices and its values "
                "(x.indices() and x.values() of a coalesced x), and make it of them in the forward "
                "(torch.sparse_coo_tensor(self.indices, self.values, size))"
            )
    if (pair := _in_one_place(module)) is not None:
        raise UserError(
            f"the parameters {pair[0]} and {pair[1]} lie in the same memory, which chunks would part: tie them by "
            "making them one parameter (head.weight = embedding.weight, without .data), or clone one of them"
        )


def check_shapes(module: nn.Module) -> None:
    """Raises UserError for a parameter or buffer of a lazy layer that has not run."""
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(each):
            raise UserError(
                f"{name} has no shape yet: its layer is a lazy one (nn.LazyLinear and the like), which takes it from a "
                "first input. Give sizes (nn.Linear), or run the model once on a row of data in the factory, before it "
                "is returned"
            )


def _in_one_place(module: nn.Module) -> tuple[str, str] | None:
    """Returns the names of two parameters that share memory though they are two objects; None if there are none."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, each in module.named_parameters():
        if each.numel():
            first, end = span_of(each)
            spans.setdefault(storage_of(each), []).append((first * each.itemsize, end * each.itemsize, name))
    for together in spans.values():
        for (_, end, one), (start, _, other) in pairwise(sorted(together)):
            if start < end:
                return one, other
    return None

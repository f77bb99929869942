"""Which modules can become a cut layer: those whose forward is one product with a weight of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from shoal.parallel.tensor.graph.flow import Use

_FORWARDS = {
    each.forward
    for each in (
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
    )
}
_AROUND = frozenset(
    [
        "t",
        "numpy_T",
        "mT",
        "transpose",
        "permute",
        "view",
        "reshape",
        "_unsafe_view",
        "add",
        "contiguous",
        "detach",
        "alias",
        "flatten",
        "unflatten",
    ]
)
"""Operations around the product that do not hinder."""


def owner(use: Use, kind: str) -> str | None:
    """Returns what the module in which a parameter is used becomes; None if it is no layer that can be cut.

    kind: "column", "row", "head" or "vocabulary"
    """
    module: Any = use.op.call.module
    forward = type(module).forward
    if isinstance(module, nn.MultiheadAttention):
        return "multihead" if forward is nn.MultiheadAttention.forward and kind in ("column", "row") else None
    if not any(each is use.weight for each in module._parameters.values()):
        return None
    if kind == "vocabulary":
        plain = forward is nn.Embedding.forward and not module.sparse and module.max_norm is None
        return kind if plain and not module.scale_grad_by_freq else None
    if kind == "head":
        return kind if type(module) is nn.Linear or _is_conv1d(module) else None
    if forward in _FORWARDS or _is_conv1d(module) or _is_product(use):
        return kind
    return None


def _is_conv1d(module: Any) -> bool:
    """True for the linear layer of GPT-2 of `transformers`."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def _is_product(use: Use) -> bool:
    """True if a module's forward is this product of its one input, with a bias of the name."""
    call = use.op.call
    given = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Tensor)]
    own = {id(each): name for name, each in call.module._parameters.items() if each is not None}
    others = [op for op in call.ops if op is not use.op]
    return (
        len(given) == 1
        and not list(call.module.children())
        and isinstance(call.result, Tensor)
        and not isinstance(call.module, _ConvNd)
        and all(op.name in _AROUND for op in others)
        and all(own.get(id(x), "bias") == "bias" or op.name != "add" for op in others for x in op.inputs)
        and set(own.values()) <= {"weight", "bias"}
    )

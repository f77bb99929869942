"""What backward keeps of a block, measured in its first forward: for `plan.recompute = {name = "budget"}`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Measured(Protocol):
    """A block, and whether its forwards are computed again."""

    module: nn.Module
    flag: bool


class Meter:
    """Measures the first forward of `block`, which runs without recomputation.

    Then `kept` are the bytes that backward keeps of it, without parameters; `saves` are those that are not its inputs,
    which are kept in any case.
    """

    def __init__(self, block: Measured) -> None:
        self.kept = self.saves = 0
        self._block = block
        self._hook = block.module.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or in_functorch():
            return
        self._hook.remove()
        self._block.flag = False
        weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        given: set[int] = set()
        tree_map_only(Tensor, lambda tensor: given.add(tensor.untyped_storage()._cdata), (args, kwargs))
        sizes: dict[int, int] = {}
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False) or (Tensor.detach, _same)

        def pack(tensor: Tensor) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                sizes[storage._cdata] = storage.nbytes()
            return outer[0](tensor)

        def after(*_: Any) -> None:
            stack.close()
            self._block.flag = True
            self.kept = sum(sizes.values())
            self.saves = sum(size for storage, size in sizes.items() if storage not in given)

        stack = ExitStack()
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, outer[1]))
        stack.callback(module.register_forward_hook(after, always_call=True).remove)


def in_functorch() -> bool:
    """True inside a transform of torch.func, which allows no hooks on saved tensors."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _same(tensor: Tensor) -> Tensor:
    return tensor

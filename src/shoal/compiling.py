"""`compile`: the forward of each block, never a whole module, whose hooks would be traced into the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.errors import UserError


def recomputable(module: nn.Module) -> list[nn.Module]:
    """The parts whose activations can be computed again one by one: the blocks, or what the model's outermost Sequentials run one after the other;
    UserError if there is neither."""
    found = blocks(module)
    if found == [module]:
        found = _children(module, nn.Sequential)
    if not found:
        raise UserError(
            "plan.recompute takes a model's repeated blocks (nn.ModuleList, nn.Sequential), and this model has none: call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in its forward where it pays"
        )
    return found


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: the children of its outermost ModuleLists, or the model itself where it has none."""
    return _children(module, nn.ModuleList) or [module]


def _children(module: nn.Module, container: type[nn.ModuleList | nn.Sequential]) -> list[nn.Module]:
    """The children of the outermost modules of the type `container`, in order."""
    if isinstance(module, container):
        return list(module.children())
    return [found for child in module.children() for found in _children(child, container)]


def compile_blocks(module: nn.Module, backend: bool | str) -> None:
    """Compiles each block's forward with `backend` (True: torch's default). Compilation itself happens at the first call."""
    for block in blocks(module):
        choice: dict[str, Any] = {} if backend is True else {"backend": backend}
        block.forward = torch.compile(block.forward, **choice)

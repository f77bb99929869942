"""`compile`: the forward of each block, never a whole module, whose hooks would be traced into the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: the children of its outermost ModuleLists, or the model itself where it has none."""
    found: list[nn.Module] = []

    def search(parent: nn.Module) -> None:
        for child in parent.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                search(child)

    search(module)
    return found or [module]


def compile_blocks(module: nn.Module, backend: bool | str) -> None:
    """Compiles each block's forward with `backend` (True: torch's default). Compilation itself happens at the first call."""
    for block in blocks(module):
        choice: dict[str, Any] = {} if backend is True else {"backend": backend}
        block.forward = torch.compile(block.forward, **choice)

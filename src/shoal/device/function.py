"""Calls of autograd functions that transforms of torch.func go through as well."""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """What `function.apply` returns of all arguments of its `forward`, by position.

    Where a function has `setup_context`, `apply` asks `inspect` for the parameters of its `forward` at each call, to
    fill in defaults: 0.1 ms, as much as a short collective takes. Here there are none to fill in.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*unwrap_dead_wrappers(arguments))  # type: ignore[misc]

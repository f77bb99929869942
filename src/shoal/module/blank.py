"""Models without values: what a constructor makes of shapes and formats, without what it computes to fill them.

Filling the weights takes most of a constructor's time, also on tensors that have no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.module.kept_outside import nothing_kept_outside

FILLING = {
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.bernoulli_.float,
}
"""Operations that give a tensor other values, and nothing else."""


class Unfilled(TorchDispatchMode):
    """Inside, tensors that are fake, or on the meta device, are not filled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and telling so at each call takes as long as the call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FILLING and _has_no_values(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))


def _has_no_values(tensor: Tensor) -> bool:
    return tensor.constant is None if isinstance(tensor, FakeTensor) else tensor.is_meta


def on_meta(factory: Callable[[], nn.Module]) -> nn.Module:
    """Makes a model on the meta device. Raises what the factory raises there."""
    with nothing_kept_outside(factory) as code, torch.device("meta"), Unfilled():
        module = factory()
        code.append(module)
    return module

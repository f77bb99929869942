"""Functions of torch that a record cannot follow, with others in their place while a model is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shoal.module.record import Record


@contextmanager
def rejection_sampling_whole(record: Record | None) -> Iterator[None]:
    """Makes `nn.init.trunc_normal_` one operation, which is recorded: it looks at the values it drew, which fake
    tensors do not have."""
    original = nn.init._no_grad_trunc_normal_

    def stand_in(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return original(tensor, *args, **kwargs)
        if record is None:
            return tensor
        return record.noted(lambda: tensor, original, (tensor, *args), kwargs)

    nn.init._no_grad_trunc_normal_ = stand_in
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@contextmanager
def conversion_by_data() -> Iterator[None]:
    """Makes `Module.to` give fake parameters the converted storage, instead of swapping the parameters.

    Swapping fails while a record refers to them.
    """
    original = torch.utils.swap_tensors

    def stand_in(one: Tensor, other: Tensor) -> None:
        if isinstance(one, FakeTensor) and isinstance(other, FakeTensor) and one.device == other.device:
            one.data = other
        else:
            original(one, other)

    torch.utils.swap_tensors = stand_in
    try:
        yield
    finally:
        torch.utils.swap_tensors = original

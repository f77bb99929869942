"""Products by groups (`torch.nn.functional.grouped_mm`) on fake tensors: torch's stand-in takes bf16 alone, its kernel
on a CPU more."""

from __future__ import annotations

from typing import Any

import torch

GROUPED = torch.ops.aten._grouped_mm.default


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation on fake tensors gives, also a product by groups in another format than bf16."""
    if func is GROUPED and args[0].dtype != torch.bfloat16:
        low = [each.to(torch.bfloat16) for each in args[:2]]
        return func(*low, *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)

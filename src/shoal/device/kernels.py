"""Which of torch's kernels a device has, where that is not to be seen from its dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.device.backend import backend

AMPERE = (8, 0)
"""The first compute capability with matrix products in bf16 and tf32."""
LARGEST_HEAD = 256
"""Elements of a head, at most, for flash attention."""


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """CUDA's (major, minor), by which its kernels are known; None of other devices."""
    module = backend(device) if device.type == "cuda" else None
    return None if module is None else module.get_device_capability(device)


def has_flash_attention(query: Tensor) -> bool:
    """Whether torch's flash attention of an accelerator, called by itself, takes `query`, of heads of `query.shape[-1]`
    elements: torch's own `scaled_dot_product_attention` would pad them to a multiple of 8. The CPU's is another
    operation."""
    width = query.shape[-1]
    return query.is_cuda and width % 8 == 0 and width <= LARGEST_HEAD and _is_flash(query.device, query.dtype)


def _is_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device, a GPU, has flash attention in `dtype`."""
    capability, is_built = compute_capability(device) or (0, 0), torch.backends.cuda.is_flash_attention_available()
    return is_built and capability >= AMPERE and dtype in (torch.bfloat16, torch.float16)


def attention_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """The name of torch's kernel for attention in `dtype` that is causal, or sees all, without another mask; None of
    other devices than GPUs."""
    if compute_capability(device) is None:
        return None
    switches = torch.backends.cuda
    if switches.flash_sdp_enabled() and _is_flash(device, dtype):
        return "FlashAttention"
    return "memory-efficient attention" if switches.mem_efficient_sdp_enabled() else "attention of plain products"


def has_grouped_products(rows: Tensor) -> bool:
    """Whether `torch.nn.functional.grouped_mm` takes `rows`: on a GPU in bf16 from Ampere on, on a CPU always."""
    if not rows.is_cuda:
        return True
    return rows.dtype == torch.bfloat16 and (compute_capability(rows.device) or (0, 0)) >= AMPERE


def allow_tf32(device: torch.device) -> None:
    """Lets products of fp32 matrices on `device` round their factors to tf32, in the whole process."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Inside, whether products of fp32 matrices may use tf32 is as said."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

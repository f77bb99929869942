"""Model FLOPs utilisation: the FLOPs of a step as a share of what this device's matrix multiplication reaches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

PEAK_SECONDS = 0.3
PEAK_SIZE = {"cpu": 1024, "cuda": 8192}

aten = torch.ops.aten
Shape = tuple[int, ...]


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """The FLOP/s of the best of a few square matrix products in `dtype`, in about 0.3 s, with the current number of threads.

    Ranks that share a host share its cores and memory: all of them measure at the same time, and the sum is the peak of the run.
    """
    size = PEAK_SIZE[device.type]
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    best, began = math.inf, time.perf_counter()
    runs = 0
    # The first product pays for the choice of a kernel and for page faults, so there is always a second one.
    while runs < 2 or time.perf_counter() - began < PEAK_SECONDS:
        best = min(best, _seconds_of(lambda: torch.mm(a, b), device))
        runs += 1
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # these matrices are no part of the run's peak
    return 2 * size**3 / best


def _seconds_of(operation: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    operation()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@dataclass(frozen=True)
class FlopCount:
    """The FLOPs of one call, and how they were found, as a sentence for a person."""

    flops: int
    note: str


def count_flops(call: Callable[[], object], *, parameters: int, tokens: int) -> FlopCount:
    """The FLOPs of `call`, which runs forward and backward of one microbatch of `tokens` tokens, once.

    What counts is what the mathematics asks for, as in the MFU of PaLM (Chowdhery et al. 2022, appendix B): attention in full,
    causal or not, and without the recomputation of scores that fused backward kernels do. Element-wise operations count as 0.
    Where nothing can be counted, the estimate is 6 x parameters x tokens (Kaplan et al. 2020). Errors of `call` pass through.
    """
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        call()
    if counted := counter.get_total_flops():
        return FlopCount(counted, "counted operation by operation; causal attention counted in full")
    return FlopCount(6 * parameters * tokens, "estimated as 6 x parameters x tokens: no operation with a known count was seen")


def mfu(step_flops: float, seconds: float, peak_flops: float) -> float | None:
    """The share, 0 to 1, of `peak_flops` that `step_flops` in `seconds` reach; both of all ranks. None where it has no meaning."""
    return step_flops / (seconds * peak_flops) if seconds > 0 and peak_flops > 0 else None


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Two products for each of the forward pass; torch's own formula adds the recomputed scores, a fifth one."""
    return 2 * sdpa_flop_count(query, key, value)


def _rnn(input: Shape, *args: Any, **kwargs: Any) -> int:
    """Every weight meets every position once: 2 x positions x elements. Weights are the 2-D tensors before the state."""
    weights = args[0] if isinstance(args[0], list) else args[:2]
    return 2 * math.prod(input[:-1]) * sum(math.prod(shape) for shape in weights if len(shape) == 2)


def _rnn_backward(input: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * _rnn(input, *args, **kwargs)


FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    aten.mkldnn_rnn_layer: _rnn,
    aten.mkldnn_rnn_layer_backward: _rnn_backward,
    aten._cudnn_rnn: _rnn,
    aten._cudnn_rnn_backward: _rnn_backward,
}
"""Added to those of torch, which knows no fused attention on CPU and no fused recurrent layer."""

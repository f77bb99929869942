"""Model FLOPs utilisation (MFU): the FLOP/s of a step relative to this device's measured peak of matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

aten = torch.ops.aten
Shape = tuple[int, ...]


@dataclass(frozen=True)
class FlopCount:
    """The FLOPs of one call, and a note on how they were found."""

    flops: int
    note: str


def count_flops(call: Callable[[], object], *, parameters: int, tokens: int) -> FlopCount:
    """Counts the FLOPs of one run of `call`: forward and backward of a microbatch of `tokens` tokens.

    Counts what the mathematics needs, as in the MFU of PaLM (Chowdhery et al. 2022, appendix B): attention in full,
    causal or not, without the scores that fused backward kernels recompute. Element-wise operations count as 0. Where
    nothing can be counted, returns the estimate 6 x parameters x tokens (Kaplan et al. 2020). Errors of `call` pass
    through.
    """
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        call()
    if counted := counter.get_total_flops():
        return FlopCount(counted, "counted operation by operation; causal attention counted in full")
    return FlopCount(
        6 * parameters * tokens, "estimated as 6 x parameters x tokens: no operation with a known count was seen"
    )


def mfu(step_flops: float, seconds: float, peak_flops: float) -> float | None:
    """Returns the MFU, 0 to 1; None where it is undefined.

    step_flops: FLOPs of a step, of all ranks.
    seconds: duration of the step.
    peak_flops: FLOP/s, of all ranks.
    """
    return step_flops / (seconds * peak_flops) if seconds > 0 and peak_flops > 0 else None


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Counts two products for each product of the forward; torch's formula also counts the recomputed scores."""
    return 2 * sdpa_flop_count(query, key, value)


def _rnn(input: Shape, *args: Any, **kwargs: Any) -> int:
    """Counts 2 x positions x elements of the weights, which are the 2-D tensors before the state."""
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
"""Additions to torch's formulas, which lack fused attention on CPU and fused recurrent layers."""

"""The two sides of MFU: the FLOPs of a sample, and the peak FLOP/s of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from shoal.device import measure_peak_flops
from shoal.engine import Engine
from shoal.models import ModelSpec
from shoal.report.flops import count_flops

_PEAKS: dict[tuple[torch.device, torch.dtype], float] = {}


def flops_per_sample(model: ModelSpec, data: Any, sequence: int | None) -> float | None:
    """Returns the FLOPs of forward and backward of one row of `sequence` tokens (None: of one sample).

    They come from the model's formula, or else are counted on the meta device without computing. Returns None where the
    model needs values, which meta tensors lack.
    """
    if model.flops_per_token is not None and sequence is not None:
        return model.flops_per_token(sequence) * sequence
    row = {key: value.unsqueeze(0).to("meta") for key, value in data[0].items()}
    with torch.device("meta"):
        module = model.factory()

    def forward_and_backward() -> None:
        model.loss(module, row)[0].backward()

    try:
        parameters = sum(parameter.numel() for parameter in module.parameters())
        return float(count_flops(forward_and_backward, parameters=parameters, tokens=sequence or 1).flops)
    except (NotImplementedError, RuntimeError):  # what torch raises for an operation that the meta device lacks
        return None


def peak_flops(engine: Engine, measure: bool = True) -> float:
    """Returns the FLOP/s of matrix products in the model's precision, summed over all ranks. A collective call.

    Each process measures once. measure: False where training goes on: ranks that have not measured count as the others.
    """
    key = engine.device, engine.precision.model
    if measure and key not in _PEAKS:
        _PEAKS[key] = measure_peak_flops(*key)
    mine = torch.tensor([_PEAKS.get(key, 0.0), key in _PEAKS], dtype=torch.float64)
    total, known = engine.world.everyone.all_reduce(mine, purpose="peak").tolist()
    return float(total / known * engine.world.size) if known else 0.0

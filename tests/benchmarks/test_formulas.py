"""The memory formulas: against what autograd really keeps, on a GPT small enough to count, and worked by hand."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.formulas import MemoryTerms, ddp_terms, loss_bytes, saved_bytes, shoal_terms
from benchmarks.memory import row
from benchmarks.workload import mean_loss
from shoal.models.gpt import GPT, GPTConfig

SMALL = GPTConfig(vocab_size=48, sequence=16, layers=2, d_model=32, heads=4, tied=False)
ROWS, SEQUENCE = 3, 8


def autograd_keeps(precision: str) -> int:
    """Bytes of the distinct storages that a forward saves, without the parameters and the batch."""
    torch.set_num_threads(1)
    model = GPT(SMALL).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    tokens = torch.zeros(ROWS, SEQUENCE, dtype=torch.long)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), tokens)}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    context = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        logits = model(tokens)
    assert logits.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.fast
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_saved_bytes_are_those_of_autograd(precision: str) -> None:
    assert saved_bytes(SMALL, ROWS, SEQUENCE, precision) == autograd_keeps(precision)


@pytest.mark.fast
@pytest.mark.parametrize("precision", ["fp32", "autocast"])
def test_the_peak_of_allocations_is_saved_plus_loss(precision: str) -> None:
    """The formulas against PyTorch's own count of bytes, over a forward and backward into gradients that exist."""
    torch.set_num_threads(1)
    cfg = GPTConfig(vocab_size=512, sequence=16, layers=2, d_model=32, heads=4, tied=False)
    model, tokens = GPT(cfg), torch.zeros(8, 16, dtype=torch.long)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext():
            logits = model(tokens)
        loss = mean_loss(logits, tokens)
        del logits
        loss.backward()
    moves = sorted(
        (e.start_ns(), e.nbytes()) for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"
    )
    peak = max(itertools.accumulate(size for _, size in moves))
    assert saved_bytes(cfg, 8, 16, precision) + loss_bytes(cfg, 128) == pytest.approx(peak, rel=0.01)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("terms", "precision", "bytes_per_parameter"),
    [
        (shoal_terms, "fp32", (4, 4, 8)),
        (shoal_terms, "bf16", (2, 4, 12)),
        (ddp_terms, "fp32", (4, 4, 8)),
        (ddp_terms, "bf16", (4, 4, 8)),
    ],
)
def test_state_bytes(terms, precision: str, bytes_per_parameter: tuple[int, int, int]) -> None:
    count = sum(parameter.numel() for parameter in GPT(SMALL).parameters())
    found = terms(SMALL, ROWS, SEQUENCE, precision)
    assert (found.parameters, found.gradients, found.optimizer) == tuple(size * count for size in bytes_per_parameter)
    kept = "autocast" if terms is ddp_terms and precision == "bf16" else precision
    # 24 tokens: three tensors of 24 x 48 fp32 at the loss
    assert loss_bytes(SMALL, 24) == 3 * 24 * 48 * 4
    assert found.activations == saved_bytes(SMALL, ROWS, SEQUENCE, kept) + 13824


@pytest.mark.fast
def test_a_row_compares_the_peak_with_terms_and_baseline() -> None:
    line = row("shoal", "fp32", MemoryTerms(100, 100, 200, 400), floor=200, peak=1100)
    assert line["predicted"] == 1000
    assert line["excess"] == pytest.approx(0.1)

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from shoal.report.flops import FORMULAS, count_flops, mfu

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def forward_and_backward(module: torch.nn.Module, *shape: int) -> None:
    out = module(torch.randn(*shape, requires_grad=True))
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def test_a_linear_layer_takes_three_products() -> None:
    # 4 rows through a 16 x 8 matrix: 2 * 4 * 16 * 8 = 1024, once forward, twice backward.
    count = count_flops(lambda: forward_and_backward(torch.nn.Linear(16, 8), 4, 16), parameters=1, tokens=1)
    assert count.flops == 3 * 1024
    assert "counted" in count.note


@pytest.mark.parametrize("heads_of_keys", [4, 2])
def test_causal_attention_counts_in_full_on_cpu(heads_of_keys: int) -> None:
    query = torch.randn(2, 4, 64, 16, requires_grad=True)
    key = torch.randn(2, heads_of_keys, 64, 16, requires_grad=True)

    def attend() -> None:
        F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True).sum().backward()

    # Scores and their product with the values: 2 * (2 * 2 * 4 * 64 * 64 * 16) forward; two products for each backward.
    forward = 2 * (2 * 2 * 4 * 64 * 64 * 16)
    assert count_flops(attend, parameters=1, tokens=1).flops == 3 * forward


def test_fused_backward_kernels_of_a_gpu_do_not_count_the_recomputed_scores() -> None:
    shape = (2, 4, 64, 16)
    forward = 2 * (2 * 2 * 4 * 64 * 64 * 16)
    for kernel in ("flash", "efficient", "cudnn"):
        formula = FORMULAS[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")]
        assert formula(shape, shape, shape, shape) == 2 * forward


def test_an_lstm_meets_every_weight_at_every_position() -> None:
    # Layer 1: 64 x 8 and 64 x 16, layer 2: 64 x 16 twice, 3 sequences of 5 positions.
    lstm = torch.nn.LSTM(8, 16, num_layers=2, batch_first=True)
    forward = 2 * 15 * (64 * 8 + 3 * 64 * 16)
    assert count_flops(lambda: forward_and_backward(lstm, 3, 5, 8), parameters=1, tokens=1).flops == 3 * forward


def test_the_fused_gpu_lstm_takes_a_list_of_weights() -> None:
    weights = [(64, 8), (64, 16), (64,), (64,)]
    assert FORMULAS[torch.ops.aten._cudnn_rnn]((5, 3, 8), weights, 4) == 2 * 15 * (64 * 8 + 64 * 16)


def test_what_cannot_be_counted_is_estimated_and_said() -> None:
    count = count_flops(lambda: torch.ones(3).sum(), parameters=100, tokens=7)
    assert count.flops == 6 * 100 * 7
    assert "estimated" in count.note


def test_an_error_of_the_model_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        count_flops(lambda: forward_and_backward(torch.nn.Linear(16, 8), 4, 15), parameters=1, tokens=1)


@pytest.mark.parametrize("seconds, peak, share", [(2.0, 100.0, 0.25), (0.0, 100.0, None), (2.0, 0.0, None)])
def test_mfu_is_a_share_of_the_peak(seconds: float, peak: float, share: float | None) -> None:
    assert mfu(50.0, seconds, peak) == share

"""Error feedback: nothing that came in is lost, and a bad step does not spoil the next."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.comm.codecs import U4, Codec, ErrorFeedback, Sign, TopK, codec, feedback
from tests.comm.test_codecs import encoded, gaussian, sent

FORMS = [codec("bf16"), codec("u8"), U4(), U4(24), Sign(), TopK(0.1)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that the tests' tensors take several."""
    monkeypatch.setattr(feedback, "BLOCK", 4096)


@pytest.mark.fast
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 1000, 9_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_was_sent_and_the_residual_sum_to_what_came_in(form: Codec, numel, dtype):
    memory = ErrorFeedback(form, numel)
    came, went = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(20):
        flat = gaussian(numel, step).to(dtype)
        came += flat
        memory.decode_add(encoded(memory, flat), went)
    assert torch.allclose(went + memory.residual, came, rtol=0, atol=2e-5)
    assert numel < 1000 or form == FORMS[0] or (went - came).norm() > 1e-3  # the residual was needed


@pytest.mark.fast
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_step_is_the_formula(form):
    memory, flat = ErrorFeedback(form, 9_001), gaussian(9_001)
    memory.residual.copy_(gaussian(9_001, 1))
    corrected = flat + memory.residual
    data = encoded(memory, flat)
    assert torch.equal(data, encoded(form, corrected))
    assert torch.equal(memory.residual, corrected - sent(form, corrected))
    assert torch.equal(sent(form, corrected), sent_by(memory, data))


def sent_by(form: Codec, data: torch.Tensor) -> torch.Tensor:
    out = torch.empty(9_001)
    form.decode(data, out)
    return out


@pytest.mark.fast
@pytest.mark.parametrize("form", [codec("fp16"), *FORMS], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_bad_step_is_sent_and_then_forgotten(form, bad):
    memory = ErrorFeedback(form, 3000)
    flat = gaussian(3000)
    flat[5], flat[6] = bad, -bad
    out = torch.empty(3000)
    memory.decode(encoded(memory, flat), out)
    assert not out.isfinite().all() or bad == 3e38
    assert memory.residual.isfinite().all()
    assert memory.residual[2048:].abs().sum() > 0 or form == codec("fp16")


@pytest.mark.fast
def test_one_object_serves_one_chunk():
    memory = ErrorFeedback(codec("u4"), 100)
    with pytest.raises(ValueError, match="one object serves one whole chunk"):
        memory.encode(gaussian(99), torch.empty(memory.encoded_bytes(99), dtype=torch.uint8))
    with pytest.raises(ValueError, match="one object serves one whole chunk"):
        memory.encode(gaussian(100), torch.empty(7, dtype=torch.uint8))
    assert memory.row == 512 and not memory.lossless

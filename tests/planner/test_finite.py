"""What a dry run answers where a model asks its tensors: whether they are finite, and whether masks are of ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from shoal import Plan
from shoal.planner import Subject
from shoal.planner.dry_run import dry_run
from shoal.planner.finite import FiniteCalls
from shoal.planner.profile import Profile, profile
from shoal.precision import precision
from tests.zoo.language import GROUPED, causal, masked

LENGTH = 10


def test_what_is_answered_and_what_is_not() -> None:
    with FakeTensorMode() as fakes, FiniteCalls(fakes):
        x = torch.empty(4, 4)
        assert not torch.isnan(x).any() and not torch.isinf(x).any() and torch.isfinite(x).all()
        assert not (x != x).any() and (x == x).all() and not (x == float("inf")).any()
        assert not (torch.isnan(x) | torch.isinf(x)).any() and torch.logical_not(torch.isnan(x)).all()
        assert torch.ones(4).bool().all() and torch.ones(4, 4)[:, :2].all() and (torch.ones(4) == 1).all()
        written, seen = torch.ones(4), torch.isnan(x)
        written[2:] = 0  # by a view
        seen |= x > 0
        for unknown in (written.all(), seen.any(), (x > 0).any(), (x == 1).all(), (torch.ones(4) == 0).all()):
            with pytest.raises(DataDependentOutputException):
                bool(unknown)


def tokens(model: nn.Module, mb: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    given = {key: mb[key] for key in ("input_ids", "attention_mask") if key in mb}
    return model(**given).logits.sum(), mb["input_ids"].numel()


def subject(mask: Tensor | None, encoder: bool = False) -> Subject:
    kind = partial(masked, "nystromformer", num_landmarks=5, segment_means_seq_len=LENGTH, conv_kernel_size=3)
    model = partial(kind, vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=4) if encoder else partial(causal, "llama", **GROUPED)  # fmt: skip
    row = {"input_ids": torch.zeros(LENGTH, dtype=torch.int64), **({} if mask is None else {"attention_mask": mask})}
    return Subject(model, tokens, row, 1, precision("fp32"))


def traced(mask: Tensor | None, encoder: bool = False) -> Profile:
    return profile(subject(mask, encoder), {})


def test_a_mask_of_ones_is_left_out_as_in_training() -> None:
    """Attention was counted with a mask, twice as much; Nystroemformer, which makes such a mask, could not be run."""
    without, ones, padded = (
        sum(part.attention.value for part in traced(mask).parts)
        for mask in (None, torch.ones(LENGTH, dtype=torch.int64), (torch.arange(LENGTH) < 7).long())
    )
    assert without == ones == padded / 2 > 0
    assert traced(None, encoder=True).blocks == 2
    assert len(dry_run(replace(subject(None, encoder=True), plan=Plan(pp=2))).stages) == 1

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.errors import UserError
from shoal.models import LOSSES, causal_lm, classification, find_loss, masked_lm, regression

pytestmark = pytest.mark.fast


class Echo(nn.Module):
    """Returns fixed logits and notes what it was called with."""

    def __init__(self, logits, wrap=False):
        super().__init__()
        self.logits, self.wrap, self.seen = logits, wrap, {}

    def forward(self, input_ids, position_ids=None, **kwargs):
        self.seen = {"position_ids": position_ids, **kwargs}
        return SimpleNamespace(logits=self.logits) if self.wrap else self.logits


@pytest.mark.parametrize("loss", [causal_lm, masked_lm])
@pytest.mark.parametrize("wrap", [False, True])
def test_cross_entropy_by_hand(loss, wrap):
    # p(label) = 3/4 in the first place, 1/4 in the second; the third does not count.
    logits = torch.tensor([[[math.log(3.0), 0.0], [math.log(3.0), 0.0], [9.0, 0.0]]])
    mb = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "labels": torch.tensor([[0, 1, -100]])}
    total, count = loss(Echo(logits, wrap), mb)
    assert total.item() == pytest.approx(math.log(4 / 3) + math.log(4))
    assert count == 2


@pytest.mark.parametrize(("given", "used"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_the_loss_is_at_least_fp32(given, used):
    logits = torch.randn(1, 4, 7).to(getattr(torch, given))
    mb = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}
    assert causal_lm(Echo(logits), mb)[0].dtype == getattr(torch, used)
    assert classification(nn.Identity(), {"inputs": logits[0], "labels": mb["labels"][0]})[0].dtype == getattr(
        torch, used
    )


def test_a_batch_without_labels_is_zero():
    mb = {"input_ids": torch.zeros(1, 2, dtype=torch.long), "labels": torch.full((1, 2), -100)}
    total, count = causal_lm(Echo(torch.randn(1, 2, 5)), mb)
    assert (total.item(), count.item()) == (0.0, 0)


def test_only_named_inputs_are_passed():
    ids = torch.zeros(1, 2, dtype=torch.long)
    model = Echo(torch.randn(1, 2, 5))
    causal_lm(model, {"input_ids": ids, "labels": ids, "position_ids": ids + 1, "document_ids": ids, "extra": ids})
    assert torch.equal(model.seen["position_ids"], ids + 1)
    assert model.seen.keys() == {"position_ids"}


def test_classification_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    total, count = classification(nn.Identity(), {"inputs": logits, "labels": torch.tensor([1, 0])})
    assert total.item() == pytest.approx(math.log(4 / 3) + math.log(2))
    assert count == 2


def test_regression_by_hand():
    column = {"inputs": torch.tensor([[1.0], [4.0]]), "targets": torch.tensor([0.0, 2.0])}
    total, count = regression(nn.Identity(), column)
    assert (total.item(), count.item()) == (5.0, 2)
    total, count = regression(nn.Identity(), {"inputs": torch.ones(2, 3), "targets": torch.zeros(2, 3)})
    assert (total.item(), count.item()) == (6.0, 6)
    with pytest.raises(UserError, match=r"\(2, 3\) where the targets are \(2,\)"):
        regression(nn.Identity(), {"inputs": torch.ones(2, 3), "targets": torch.zeros(2)})


def test_losses_by_name():
    assert find_loss("causal_lm") is causal_lm
    assert set(LOSSES) == {"causal_lm", "masked_lm", "classification", "regression"}
    with pytest.raises(UserError, match='Did you mean "regression"'):
        find_loss("regresion")

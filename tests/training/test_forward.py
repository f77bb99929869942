"""What surrounds the forward of a microbatch."""

from __future__ import annotations

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from shoal.engine import Engine
from shoal.models import regression
from shoal.training.forward import Forward
from tests.parity.cases import vectors

pytestmark = pytest.mark.fast


class Frozen(nn.BatchNorm1d):
    """A layer that stays in evaluation mode, as those do whose statistics are not to change."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def test_all_of_a_module_trains_but_what_its_own_train_leaves_out() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), Frozen(2)))
    forward = Forward(module, *(Mock() for _ in range(4)))
    for part in (module, module[1], module[1][0]):
        part.eval()
        forward.set_training()
        assert [each.training for each in module.modules()] == [True, True, True, True, False]


def test_a_layer_that_leaves_itself_out_does_so_from_the_first_step() -> None:
    """It said that it trains, as every module does that nobody has asked: its statistics moved until an evaluation."""
    engine = Engine(
        lambda: nn.Sequential(nn.Linear(10, 4), Frozen(4), nn.Linear(4, 3)), regression,
        partial(torch.optim.SGD, lr=0.1), global_batch=8, microbatch=4,
    )  # fmt: skip
    for batch in engine.batches(vectors(), steps=1):
        engine.step(batch)
    assert not engine.module[1].training and not engine.module[1].running_mean.any()
    engine.close()


def test_a_module_that_trains_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    module.train = Mock()  # type: ignore[method-assign]
    Forward(module, *(Mock() for _ in range(4))).set_training()
    module.train.assert_not_called()

"""Ranks that do not exist, for dry runs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shoal.comm.silent import AtOnce

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("run", [1, 2])
def test_work_of_a_lane_is_none_of_a_checkpointed_block(run):
    """Which weights come while a block runs, or runs again, may differ: a lane's own thread brings them."""
    lane, runs, seen = AtOnce(torch.device("cpu")), [], []

    def block(x: Tensor) -> Tensor:
        runs.append(x)
        if len(runs) == run:
            lane.submit(lambda: seen.append(torch.tensor([1.0]).mul(2)))
        return x.sin().cos()

    x = torch.ones(3, requires_grad=True)
    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    checkpoint(block, x, use_reentrant=False, context_fn=kept).sum().backward()
    assert len(runs) == 2 and len(seen) == 1
    torch.testing.assert_close(x.grad, -x.sin().sin() * x.cos())

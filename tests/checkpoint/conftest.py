"""The state that most tests of checkpoints save."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """One tensor that is cut (over 64 KiB), a master in fp64, small ones, a scalar, an empty one and a counter."""
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embedding": torch.randn(131, 17, 11, generator=generator),
        "model.weight": torch.randn(33, 7, generator=generator),
        "model.scalar": torch.tensor(2.5),
        "buffer.empty": torch.empty(0, 3),
        "optim.weight.exp_avg": torch.randn(120, 90, generator=generator, dtype=torch.float64),
        "optim.weight.step": torch.tensor(7, dtype=torch.int64),
    }

"""What operations take beside their work."""

from __future__ import annotations

import torch

from shoal.device import CPU, measure_operations, measure_shortest


def test_an_operation_of_a_model_takes_longer_than_one_alone():
    """Modules, autograd and parameters' gradients come with it; nothing is drawn that a run would draw."""
    before = torch.get_rng_state()
    alone, in_a_model = measure_shortest(CPU), measure_operations(CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < alone < in_a_model < 1e-2

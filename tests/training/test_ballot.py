"""Which way the ballot's numbers go: the host reads none from the device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from shoal.device import stand_in
from shoal.training.ballot import Ballot
from tests.device.recorder import Recorder


class Buffers:
    """Buffers of which none was changed in this step."""

    def __len__(self) -> int:
        return 1

    def flags(self, microbatches: int) -> list[bool]:
        return [False, False]


@pytest.mark.parametrize(("where", "ways"), [("meta", ["cpu", "meta"]), ("cpu", ["cpu"])])
def test_what_the_host_asks_of_each_step_it_is_told_by_hosts(where, ways):
    """Tensors without data cannot be read, so this is a device for which nobody can wait."""
    device, reduced = torch.device(where), []

    def all_reduce(tensor: Tensor, purpose: str) -> Tensor:
        reduced.append(tensor.device.type)
        return tensor

    partners = SimpleNamespace(size=2, all_reduce=all_reduce)
    none = SimpleNamespace(row=lambda: torch.empty(0, device=device), read=lambda row: row)
    effects = SimpleNamespace(buffers=Buffers(), statistics=(), merges_statistics=True, experts=none)
    forward = SimpleNamespace(effects=effects, randomness=SimpleNamespace(device=device), streams=1)
    groups = SimpleNamespace(partners=partners, axes=(), squared_norm=lambda squares: squares)
    hooks = SimpleNamespace(reshaped="", hooked=False)
    step = SimpleNamespace(touched={"weight": True, "bias": True}, squares=torch.zeros(3, device=device))
    with stand_in("meta", Recorder()):
        answer = Ballot(forward, groups, hooks).cast(torch.zeros(2, device=device), step, 1, 0, False)
    assert reduced == ways and answer.untouched == []
    assert (answer.totals.shape, answer.squares.shape) == ((2,), (3,))

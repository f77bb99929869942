"""The device of a world."""

from __future__ import annotations

import pytest
import torch

from shoal.comm import World


@pytest.mark.parametrize(("device", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_a_device_without_an_index_is_the_one_that_is_current(device, index, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    world = World.single(device)
    assert world.device == torch.device("cuda", index) and taken == [world.device]

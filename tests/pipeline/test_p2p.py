"""The channels between two stages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shoal.device import stand_in
from shoal.pipeline.p2p import Mail
from tests.device.recorder import Recorder


@pytest.mark.parametrize(("device", "communicators"), [("cuda", 4), ("cpu", 2)])
def test_on_gpus_each_direction_has_a_communicator(device, communicators):
    """An early receive would keep back what NCCL is to send the other way. Both ranks make the groups in one order, and
    what one sends on the other receives on."""
    made: list[list[str]] = [[], []]

    def mail(place: int) -> Mail:
        def group(name: str, ranks: list[int]) -> str:
            made[place].append(name)
            return name

        world = SimpleNamespace(serial=lambda _: 0, group=group, lane=object, device=torch.device(device))
        return Mail(world, [0, 1], place)

    with stand_in("cuda", Recorder()):
        lower, higher = mail(0), mail(1)
        for each in (lower, higher):
            each.open([(0, 1)])
    assert made[0] == made[1] and len(set(made[0])) == communicators
    for way in ("forward", "backward"):
        for sends in (True, False):
            assert lower._groups[way, 1, sends] == higher._groups[way, 0, not sends]

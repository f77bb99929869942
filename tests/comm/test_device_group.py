"""Which process group carries the tensors of an accelerator."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal import UserError
from shoal.comm.device_group import DeviceGroup
from tests.comm.test_nccl import StandIn

TIMEOUT = timedelta(seconds=30)
DEVICE = torch.device("hpu")


@pytest.fixture
def registered(monkeypatch):
    """Registers a maker of process groups for DEVICE, as extensions of torch do."""
    backends = dist.Backend
    for name in ("default_device_backend_map", "_plugins", "backend_type_map", "backend_capability"):
        monkeypatch.setattr(backends, name, dict(getattr(backends, name)))
    monkeypatch.setattr(backends, "backend_list", list(backends.backend_list))
    monkeypatch.setattr(backends, "MADEUP", "madeup", raising=False)
    return lambda maker, **options: backends.register_backend("madeup", maker, devices=[DEVICE.type], **options)


def test_an_extensions_is_taken_in_either_form(registered):
    store, asked = dist.HashStore(), []

    def plain(*given):
        asked.append(given)
        return StandIn()

    def extended(about, options):
        asked.append((about.store, about.group_rank, about.group_size, about.timeout))
        assert about.global_ranks_in_group == [0, 1, 2] and options is None
        return StandIn()

    for maker, options in ((plain, {}), (extended, {"extended_api": True})):
        registered(maker, **options)
        opened = DeviceGroup.open(store, 1, 3, DEVICE, TIMEOUT)
        assert (opened.rank, opened.size, opened.carrier) == (1, 3, "MADEUP")
    (_, *first), (_, *second) = asked
    assert first == second == [1, 3, TIMEOUT]


@pytest.mark.parametrize("kind", ["mps", "vulkan"])
def test_a_device_whose_tensors_none_carries_is_refused(kind):
    with pytest.raises(UserError, match=rf'2 ranks on {kind}: .* no process group for these devices .*device="cpu"'):
        DeviceGroup.open(dist.HashStore(), 0, 2, torch.device(kind), TIMEOUT)


def test_without_groups_of_calls_the_receive_is_posted_first():
    class Apart(StandIn):
        supports_coalescing = False

    pg = Apart()
    DeviceGroup(pg, DEVICE).exchange(torch.zeros(1), 0, torch.ones(1), 2)
    assert [call[0] for call in pg.calls] == ["recv", "send"] and pg.waited == 2

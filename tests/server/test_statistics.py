"""BatchNorm's statistics on a parameter server: those that ranks, or one process, would have."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal.server import Async, Batch, Options, ParameterServer, Share, Sync, connect
from tests.server.common import SGD, TOKEN, client, together


def model(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=momentum)
    return nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def statistics(of: nn.Module) -> dict[str, torch.Tensor]:
    return dict(of.named_buffers())


def train(addresses: list[str], momentum: float | None, rank: int, steps: int) -> nn.Module:
    mine = model(momentum)
    with torch.no_grad():
        for each in mine.buffers():
            each.add_(7)  # what a client begins with does not count
    with connect(addresses, TOKEN, rank=rank, timeout=20.0) as worker:
        for step in range(steps):
            version = worker.pull(mine)
            mine(batch(rank, step)).square().sum().backward()
            worker.push(mine, version)
            mine.zero_grad()
        worker.pull(mine)
    return mine


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("count", [1, 2])
def test_under_sync_they_are_those_of_the_batches_one_after_the_other(momentum, count):
    options = [Options(share=Share(index, count)) for index in range(count)]
    servers = [ParameterServer(model(momentum), SGD, Sync(2), token=TOKEN, options=each) for each in options]
    try:
        found = together(*(partial(train, [each.address for each in servers], momentum, r, 3) for r in (0, 1)))[0]
    finally:
        for server in servers:
            server.close()
    expected = model(momentum)
    optimizer = SGD(expected.parameters())
    for step in range(3):
        for rank in (0, 1):
            (expected(batch(rank, step)).square().sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in statistics(expected).items():
        torch.testing.assert_close(statistics(found)[name], value, rtol=1e-5, atol=1e-6)
    assert int(statistics(found)["1.num_batches_tracked"]) == 6


@pytest.mark.parametrize("policy", [Async(), Batch(2)])
def test_each_gradient_that_is_taken_brings_its_batches_once(policy, tmp_path):
    """Of weights that others have changed meanwhile too, and of a server that was killed."""
    frozen = partial(torch.optim.SGD, lr=0.0)
    kept = partial(ParameterServer, model(), frozen, policy, token=TOKEN, directory=tmp_path)
    one, two, server = model(), model(), kept()
    with client(server, rank=0) as first, client(server, rank=1) as second:
        versions = first.pull(one), second.pull(two)
        for mine, worker, rank in ((one, first, 0), (two, second, 1)):
            mine(batch(rank, 0)).sum().backward()
            worker.push(mine, versions[rank])
    server._listener.close()  # killed: it has written no checkpoint since
    server._parts[""]._journal.close()
    with kept() as server, client(server, rank=0) as worker:
        worker.pull(one)
    expected = model()
    for rank in (0, 1):
        expected(batch(rank, 0))
    for name, value in statistics(expected).items():
        torch.testing.assert_close(statistics(one)[name], value, rtol=1e-6, atol=1e-7)

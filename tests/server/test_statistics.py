"""BatchNorm's statistics on a parameter server: those that ranks, or one process, would have."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from shoal.data import stack_samples
from shoal.server import Async, Batch, Options, ParameterServer, Share, Sync, connect
from tests.server.common import SGD, TOKEN, client, together
from tests.zoo.entry import classes, images
from tests.zoo.vision import timm, torchvision


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


def zoo(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, _, which = name.partition(" ")
    return {"timm": timm, "torchvision": torchvision}[kind](which).train()


def sum_of_losses(of: nn.Module, rank: int, step: int) -> torch.Tensor:
    first = (8 * step + 4 * rank) % 16
    total, _ = classes(of, stack_samples(images(64)[first : first + 4]))
    return total


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["torchvision resnet18", "timm mobilenetv3_small_050"])
def test_a_model_of_others_has_after_training_what_one_process_has(name):
    """Two clients of two servers under Sync: every weight and every buffer after 3 steps."""
    options = [Options(share=Share(index, 2)) for index in range(2)]
    servers = [ParameterServer(zoo(name), SGD, Sync(2), token=TOKEN, options=each) for each in options]

    def trained(rank: int, mine: nn.Module) -> None:
        with connect([each.address for each in servers], TOKEN, rank=rank, timeout=20.0) as worker:
            for step in range(3):
                version = worker.pull(mine)
                sum_of_losses(mine, rank, step).div(4).backward()
                worker.push(mine, version)
                mine.zero_grad()
            worker.pull(mine)

    clients = [zoo(name) for _ in range(2)]
    try:
        together(*(partial(trained, rank, mine) for rank, mine in enumerate(clients)))
    finally:
        for server in servers:
            server.close()
    expected = zoo(name)
    optimizer = SGD(expected.parameters())
    for step in range(3):
        for rank in (0, 1):
            sum_of_losses(expected, rank, step).div(8).backward()
        optimizer.step()
        optimizer.zero_grad()
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(clients[0].state_dict()[key], value, rtol=1e-4, atol=1e-5)


class Centred(nn.Module):
    """A moving average that forwards write, which a server knows nothing of, and one of BatchNorm, which it keeps."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes, self.norm, self.out = writes, nn.BatchNorm1d(3), nn.Linear(3, 1)
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.centre.lerp_(rows.detach().mean(0), 0.1)
        return self.out(self.norm(rows) - self.centre)


@pytest.mark.parametrize("writes", [False, True])
def test_a_client_says_which_buffer_no_server_has(writes):
    mine, server = Centred(writes), ParameterServer(Centred(writes), SGD, Sync(1), token=TOKEN)
    with warnings.catch_warnings(record=True) as w, connect([server.address], TOKEN, rank=0, timeout=20.0) as worker:
        warnings.simplefilter("always")
        for _ in range(3):
            version = worker.pull(mine)
            mine(torch.randn(4, 3)).sum().backward()
            worker.push(mine, version)
            mine.zero_grad()
    server.close()
    said = [str(each.message) for each in w if "buffer" in str(each.message)]
    assert len(said) == writes and all("changes the buffer centre" in each for each in said)

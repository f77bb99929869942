"""Running statistics composed over ranks, and SyncBN against one process with the whole batch."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from shoal import Plan
from shoal.comm.simulation import simulate_world
from shoal.device import stand_in
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import classification
from shoal.module.batchnorm import RunningStatistics, SyncBatchNorm, synchronise
from tests.device.recorder import Recorder
from tests.parity.cases import images
from tests.pool import run_ranks


@pytest.mark.fast
@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
def test_statistics_of_consecutive_runs_compose_as_one_sequence(momentum):
    """Seven microbatches on one process; the same ones as runs of 3, 0 and 4 on three replicas."""
    batches = [torch.randn(5, 3) * (i + 1) for i in range(7)]
    start = batches[0] * 3
    whole = nn.BatchNorm1d(3, momentum=momentum)
    whole(start)
    replicas = [nn.BatchNorm1d(3, momentum=momentum) for _ in range(3)]
    for replica in replicas:
        replica.load_state_dict(whole.state_dict())
    for batch in batches:
        whole(batch)
    runs = [(0, 3), (3, 3), (3, 7)]
    merging = [RunningStatistics(nn.Sequential(replica)) for replica in replicas]
    terms = []
    for statistics, replica, (first, last) in zip(merging, replicas, runs, strict=True):
        statistics.begin()
        for batch in batches[first:last]:
            replica(batch)
        assert statistics.updates() == last - first
        terms.append(statistics.term(torch.tensor([7.0 - last], dtype=torch.float64)))
    for statistics, replica in zip(merging, replicas, strict=True):
        statistics.commit(torch.stack(terms).sum(0))
        torch.testing.assert_close(replica.running_mean, whole.running_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(replica.running_var, whole.running_var, rtol=1e-5, atol=1e-6)
        assert replica.num_batches_tracked == whole.num_batches_tracked == 8


def test_the_host_waits_for_no_count():
    """Tensors without data cannot be read."""
    root = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2, momentum=None)).to("meta")
    statistics = RunningStatistics(root)
    with stand_in("meta", Recorder()):
        statistics.begin()
        statistics.commit(statistics.term(statistics.updates()))
        statistics.restore()


class Domains(nn.Module):
    """A BatchNorm for each of two domains; a microbatch is of one, or of both, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norms, self.out = nn.ModuleList(nn.BatchNorm1d(4, momentum=0.4) for _ in range(2)), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, domains: list[int]) -> torch.Tensor:
        return sum(self.out(self.norms[domain](x)) for domain in domains)


class InOrder:
    """The samples 0 to 15 in each step."""

    def epoch(self, step: int) -> int:
        return step

    def ids(self, step: int) -> np.ndarray:
        return np.arange(16)


def of_domains(world) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    kinds = [[0], [0], [1], [0, 1]]  # of the four microbatches of a step

    def loss(model, mb):
        out = model(mb["x"], kinds[int(mb["kind"][0])])
        return out.square().sum(), torch.tensor(len(out))

    draw = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(4, generator=draw) * (1 + i) + i, "kind": torch.tensor(i // 4)} for i in range(16)]
    options = {"global_batch": 16, "microbatch": 4, "world": world}
    engine = Engine(Domains, loss, partial(torch.optim.SGD, lr=0.0), Plan(dp=world.size), **options)
    for batch in engine.batches(data, steps=3, cursor=InOrder()):
        engine.step(batch)
    found = {name: value.clone() for name, value in engine.module.named_buffers()}
    engine.close()
    return found


@pytest.mark.fast
@pytest.mark.parametrize("size", [2, 4])
def test_layers_that_do_not_run_in_every_microbatch(size):
    """Decay was reckoned by the microbatches of other ranks, whether a layer had run there or not."""
    (wanted,) = simulate_world(1, of_domains)
    for found in simulate_world(size, of_domains):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.Flatten()
        )
        self.head = nn.Linear(6 * 8 * 8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def train(world, synchronised: bool):
    sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    options = {"sync_bn": True} if synchronised else {"microbatch": 12}
    engine = Engine(Net, classification, sgd, global_batch=12, precision="fp64", world=world, **options)
    data = images()[:38]  # the last batch has two samples: with three ranks one of them has none
    losses = [engine.step(batch).loss for batch in engine.batches(data, steps=10)]
    names = sorted(type(m).__name__ for m in engine.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return losses, dict(engine.module.named_buffers()), engine.evaluate(data).loss, names


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sync_bn_equals_one_process_with_the_whole_batch(size):
    losses, buffers, evaluation, _ = run_ranks(train, 1, False)[0]
    for result in run_ranks(train, size, True):
        assert result[0] == pytest.approx(losses, rel=1e-9)
        assert result[2] == pytest.approx(evaluation, rel=1e-8)
        assert result[3] == ["SyncBatchNorm", "SyncBatchNorm"]
        for name, value in buffers.items():
            torch.testing.assert_close(result[1][name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.fast
def test_batchnorm_needs_a_microbatch_or_sync_bn():
    sgd = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises(
        UserError,
        match="microbatch is not given, and the model has BatchNorm, "
        "whose result depends on which samples share one: give it",
    ):
        Engine(Net, classification, sgd, global_batch=4)
    with pytest.raises(UserError, match="microbatch = 2 with sync_bn"):
        Engine(Net, classification, sgd, global_batch=4, microbatch=2, sync_bn=True)


@pytest.mark.fast
def test_evaluation_uses_running_statistics():
    plain = nn.BatchNorm1d(3)
    plain(torch.randn(8, 3))
    from shoal.comm import World

    synchronised = copy.deepcopy(plain)
    synchronise(synchronised, World.single("cpu").everyone)
    plain.eval(), synchronised.eval()
    x = torch.randn(4, 3)
    assert torch.equal(plain(x), synchronised(x))


class Activated(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@pytest.mark.fast
def test_what_a_batchnorm_has_beside_statistics_stays_or_is_named():
    from shoal.comm import World

    group = World.single("cpu").everyone
    plain, x = nn.BatchNorm1d(3), torch.randn(8, 3)
    plain.register_forward_hook(lambda module, args, output: output * 2)
    wanted = plain(x)
    plain.reset_running_stats()
    synchronise(plain, group)
    assert isinstance(plain, SyncBatchNorm)
    torch.testing.assert_close(plain(x), wanted)
    with pytest.raises(UserError, match="sync_bn: 1 is a Activated, a BatchNorm that does more"):
        synchronise(nn.Sequential(nn.Linear(3, 3), Activated(3)), group)

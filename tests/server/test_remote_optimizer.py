"""A distributed optimizer: owners step their parts by the gradients of one context, clipped by the norm of all."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import LaunchError, RemoteError, TrainingError, UserError
from shoal.server.remote import DistributedOptimizer, Owner, OwnerOptions, remote
from tests.server.common import TOKEN, together

pytestmark = pytest.mark.fast
CLIP = 0.05


def layer(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))


class Table(nn.Module):
    """Rows with sparse gradients, and a weight that its backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 4, sparse=True)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.rows(ids) @ self.weight) @ self.weight


class Turned(nn.Module):
    """Has a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).abs()


class Outer(nn.Module):
    def __init__(self, addresses: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.below = nn.ModuleList(remote(address, layer, token=TOKEN, name="below", seed=5) for address in addresses)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for each in self.below:
            x = each(x)
        return x


def owner() -> Owner:
    return Owner([layer, Table, Turned, Outer], token=TOKEN, options=OwnerOptions(say=lambda line: None))


def local(factory, *args, seed=0) -> nn.Module:
    torch.manual_seed(seed)
    return factory(*args)


def exposed(of: Owner) -> nn.Module:
    (entry,) = of._registry._entries.values()
    return entry.exposed.module


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


KINDS = [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    partial(torch.optim.Adagrad, lr=0.05),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.func.__name__)
@pytest.mark.parametrize("clip", [None, CLIP])
def test_owners_and_local_parameters_step_as_one_optimizer_would(kind, clip):
    schedule = shoal.lr.linear(total=6, warmup=2)
    with owner() as first, owner() as second, owner() as third:
        far = [local(layer), remote(first.address, Outer, [second.address, third.address], token=TOKEN, seed=1)]
        near = [local(layer), nn.Sequential(local(nn.Linear, 4, 4, seed=1), local(layer, seed=5), local(layer, seed=5))]
        ours = DistributedOptimizer(kind, nn.ModuleList(far), clip=clip, schedule=schedule)
        parameters = [p for module in near for p in module.parameters()]
        theirs = kind(parameters)
        course = schedule(theirs)
        for step in range(4):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            for part in (0, 1):  # gradients add up
                far[1](far[0](x + part)).pow(2).mean().backward()
                near[1](near[0](x + part)).pow(2).mean().backward()
            norm = ours.step()
            expected = nn.utils.clip_grad_norm_(parameters, clip or 1e9)
            assert norm == pytest.approx(float(expected), rel=1e-6) and norm > CLIP
            theirs.step()
            course.step()
            assert ours.lr == theirs.param_groups[0]["lr"]
            ours.zero_grad()
            theirs.zero_grad()
            equal = same if clip is None else close
            assert equal(far[0], near[0]) and equal(exposed(first).linear, near[1][0])
            assert equal(exposed(second), near[1][1]) and equal(exposed(third), near[1][2])


def test_complex_weights_count_in_the_norm():
    with owner() as first:
        far, near, x = remote(first.address, Turned, token=TOKEN, seed=0), local(Turned), torch.randn(3, 4)
        ours = DistributedOptimizer("sgd", far, lr=0.1, clip=CLIP)
        for model in (far, near):
            model(x).sum().backward()
        assert ours.step() == pytest.approx(float(nn.utils.clip_grad_norm_(near.parameters(), CLIP)))
        torch.optim.SGD(near.parameters(), lr=0.1).step()
        assert close(exposed(first), near)


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.func.__name__)
def test_a_schedule_changes_momentum_at_owners_too(kind):
    """As the one that goes up and down once does, whose momentum goes the other way."""
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=6)
    with owner() as first:
        far, near = remote(first.address, layer, token=TOKEN, seed=0), local(layer)
        ours, theirs = DistributedOptimizer(kind, far, schedule=schedule), kind(near.parameters())
        course, x = schedule(theirs), torch.randn(8, 4)
        for _ in range(5):
            for model, optimizer in ((far, ours), (near, theirs)):
                model(x).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            course.step()
        assert same(exposed(first), near)


def close(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )


def test_an_owner_that_is_reached_twice_steps_once():
    """Two remote modules have one and the same module below them; so does a ring."""
    with owner() as first, owner() as second:
        far = [remote(first.address, Outer, [second.address] * 2, token=TOKEN, seed=seed) for seed in (0, 1)]
        near, below = [local(nn.Linear, 4, 4, seed=seed) for seed in (0, 1)], local(layer, seed=5)
        ours = DistributedOptimizer("sgd", far, lr=0.1, momentum=0.9)
        parameters = [p for module in (*near, below) for p in module.parameters()]
        theirs = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for step in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            far[1](far[0](x)).sum().backward()
            below(below(near[1](below(below(near[0](x)))))).sum().backward()
            expected = nn.utils.clip_grad_norm_(parameters, 1e9)
            assert ours.step() == pytest.approx(float(expected), rel=1e-5)
            theirs.step()
            ours.zero_grad()
            theirs.zero_grad()
            assert close(exposed(second), below)


def test_trainers_that_share_a_module_do_not_mix_gradients_and_each_backward_has_its_own_weights():
    """One steps while a forward of the other waits: its gradient is that of the weights which that forward has seen."""
    with owner() as shared, ExitStack() as stack:
        tables = [remote(shared.address, Table, token=TOKEN, name="table", seed=0) for _ in range(2)]
        mine = [stack.enter_context(shoal.context()) for _ in tables]
        optimizers = [DistributedOptimizer("sgd", table, lr=0.1) for table in tables]
        near = local(Table)
        ids = [torch.tensor([1, 2, 2]), torch.tensor([2, 3, 4])]

        def forward(number: int) -> torch.Tensor:
            from shoal.server.remote.contexts import entered

            with entered(mine[number]):
                return tables[number](ids[number]).pow(2).sum()

        for _ in range(3):
            losses = [forward(0), forward(1)]
            seen = copy.deepcopy(near)
            for number, loss in enumerate(losses):
                loss.backward()
                optimizers[number].step(mine[number])
                optimizers[number].zero_grad(mine[number])
                seen.zero_grad()
                seen(ids[number]).pow(2).sum().backward()
                near.rows.weight.grad, near.weight.grad = seen.rows.weight.grad, seen.weight.grad
                torch.optim.SGD(near.parameters(), lr=0.1).step()
            assert same(exposed(shared), near)


def test_many_trainers_of_one_module_at_once():
    """Each trains for itself; all updates arrive, and none is lost."""
    with owner() as shared:

        def train(number: int) -> None:
            table = remote(shared.address, Table, token=TOKEN, name="table", seed=0)
            optimizer = DistributedOptimizer("sgd", table, lr=1.0)
            for _ in range(5):
                with shoal.context() as mine:
                    (table(torch.tensor([number])) * 0.0).sum().backward()
                    assert optimizer.step(mine) == 0.0
            with shoal.context() as mine:
                table(torch.tensor([number])).sum().backward()
                optimizer.step(mine)

        before = copy.deepcopy(local(Table))
        together(*(partial(train, number) for number in range(4)))
        after = exposed(shared)
        changed = (after.rows.weight != before.rows.weight).any(1).nonzero()[:, 0].tolist()
        assert changed == [0, 1, 2, 3] and not torch.equal(after.weight, before.weight)


def test_nobody_steps_where_the_norm_is_not_finite_or_an_owner_is_gone():
    with owner() as first:
        second = owner()
        far = [remote(each.address, layer, token=TOKEN, seed=0) for each in (first, second)]
        ours, before = DistributedOptimizer("sgd", far, lr=0.1), copy.deepcopy(exposed(first))
        x = torch.randn(8, 4)
        (far[1](far[0](x)) * float("inf")).sum().backward()
        with pytest.raises(TrainingError, match="the norm of the gradient is"):
            ours.step()
        ours.zero_grad()
        far[1](far[0](x)).sum().backward()
        second.close()
        with pytest.raises(LaunchError, match=f"layer of the owner at {second.address}"):
            ours.step()
        assert same(exposed(first), before)


def test_what_is_no_optimizer_is_refused_by_name():
    with owner() as first:
        far = remote(first.address, layer, token=TOKEN)
        with pytest.raises(
            UserError, match=r"^DistributedOptimizer: adamv with \{\}: 'adamv' is not one of.*Did you mean"
        ):
            DistributedOptimizer("adamv", far)
        with pytest.raises(UserError, match="there are no modules"):
            DistributedOptimizer("sgd", [], lr=0.1)
        with pytest.raises(UserError, match=r"a Parameter is no module: give modules"):
            DistributedOptimizer("sgd", layer().parameters(), lr=0.1)
        with pytest.raises(UserError, match="nothing to update: the modules have no parameters"):
            DistributedOptimizer("sgd", nn.ReLU(), lr=0.1)
        with pytest.raises(UserError, match=r"sgd with .*momentun"):
            DistributedOptimizer("sgd", far, lr=0.1, momentun=0.9)
        own = type("SGD", (torch.optim.SGD,), {})  # owners would step by torch's
        with pytest.raises(UserError, match=r'is not what owners have by the name "sgd": give torch\.optim\.SGD'):
            DistributedOptimizer(partial(own, lr=0.1), far)
        with pytest.raises(UserError, match=r"clip = 0 is not above 0"):
            DistributedOptimizer("sgd", far, lr=0.1, clip=0)
        table = remote(first.address, Table, token=TOKEN)
        optimizer = DistributedOptimizer("adam", table)
        table(torch.tensor([1])).sum().backward()
        with pytest.raises(RemoteError, match="does not support sparse gradients"):
            optimizer.step()

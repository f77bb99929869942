"""Owners and clients that are killed in mid-call, and messages that nobody should have sent."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.wire import pack
from shoal.comm.world import World
from shoal.errors import LaunchError, ShoalError
from shoal.server.remote import DistributedOptimizer, Owner, OwnerOptions, RemoteModule, remote
from shoal.server.remote.messages import (
    TO_CLIENT,
    Backward,
    Build,
    Drop,
    Forward,
    Join,
    Leave,
    Measure,
    Optimize,
    Release,
    Update,
)
from shoal.server.remote.payload import NOTHING, taken_apart, written
from shoal.server.sessions import Address, call
from tests.pool import disposable_ranks
from tests.server.common import TOKEN, together
from tests.server.test_sessions import KEY, one_try, until

QUIET = OwnerOptions(say=lambda line: None, message_bytes=1 << 20)


class Slow(nn.Module):
    """Sleeps; with a backward that sleeps, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, forward: float, backward: float = 0.0) -> torch.Tensor:
        time.sleep(forward)
        y = self.linear(x)
        y.register_hook(lambda grad: time.sleep(backward))
        return y


class Far(nn.Module):
    """Holds a remote module, as the one in the middle of three."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.inner = remote(address, Slow, token=TOKEN, seed=0)

    def forward(self, *args: Any) -> torch.Tensor:
        return self.inner(*args)


def owner() -> Owner:
    return Owner([Slow, Far, nn.Linear], token=TOKEN, options=QUIET)


def own(world: World, path: Path) -> None:
    """A process that owns modules until it is killed."""
    with owner() as here:
        path.with_suffix(".new").write_text(here.address)
        path.with_suffix(".new").rename(path)
        here.wait()


def use(world: World, address: str, shared: bool, where: str) -> None:
    """A client that is killed in a forward or in a backward, with graphs, gradients and an optimizer at the owner."""
    slow = remote(address, Slow, token=TOKEN, shared=shared)
    optimizer = DistributedOptimizer("sgd", slow, lr=0.1)
    slow(torch.ones(1, 3), 0.0).sum().backward()
    optimizer.step()
    kept = [slow(torch.ones(1, 3), 0.0) for _ in range(3)]
    out = slow(torch.ones(1, 3), 0.6 if where == "forward" else 0.2, 0.5)
    out.sum().backward()
    assert kept


def works(module: RemoteModule) -> bool:
    x = torch.ones(1, 3, requires_grad=True)
    module(x, 0.0).sum().backward()
    return x.grad is not None


def kill_an_owner(path: Path, number: int) -> None:
    path = path / str(number)
    with owner() as other, owner() as between, disposable_ranks(own, 1, path) as (rank,):
        until(path.exists)
        address = path.read_text()
        far, near = remote(address, Slow, token=TOKEN), remote(other.address, Slow, token=TOKEN)
        nested = remote(between.address, Far, address, token=TOKEN)
        x = torch.ones(1, 3)
        waiting = far(x, 0.0, 30.0)

        def killed(call: Callable[[], Any], names: str) -> None:
            with pytest.raises(ShoalError, match=names):
                call()

        def kill() -> None:
            time.sleep(0.1)
            assert works(near)
            rank.process.kill()

        named = f"Slow of the owner at {address}"
        together(
            lambda: killed(lambda: far(x, 30.0), named),
            lambda: killed(lambda: waiting.sum().backward(), named),
            lambda: killed(lambda: nested(x, 30.0), f"Far of the owner at {between.address}.*{named}"),
            kill,
        )
        with pytest.raises(LaunchError, match=named):
            far(x, 0.0)
        assert works(near) and other.holdings().clients == 1


def kill_a_client(number: int) -> None:
    shared, where = bool(number & 1), ("forward", "backward")[number // 2 % 2]
    with owner() as here:
        mine = remote(here.address, Slow, token=TOKEN)
        before = here.holdings()
        with disposable_ranks(use, 1, here.address, shared, where) as (rank,):
            until(lambda: here.holdings().clients == 2 and here.holdings().graphs == 4)
            if where == "backward":
                until(lambda: here.holdings().graphs == 3)
            rank.process.kill()
            assert works(mine)
            until(lambda: here.holdings() == before._replace(contexts=1))
        assert works(mine)


def test_an_owner_that_is_killed_is_named_and_others_go_on(tmp_path):
    kill_an_owner(tmp_path, 0)


@pytest.mark.parametrize("number", range(4))
def test_what_a_killed_client_has_left_goes(number):
    kill_a_client(number)


@pytest.mark.matrix
def test_twenty_owners_and_twenty_clients_killed(tmp_path):
    for number in range(20):
        kill_an_owner(tmp_path, number)
        kill_a_client(number)


def bad_messages(draw: random.Random) -> tuple[Any, list[torch.Tensor]]:
    """A record and what follows it, from one that knows the token: none is what should come at its place."""
    number, text = draw.randrange(-5, 10), draw.choice(["", "x", "é" * 50, "../..", "Slow", "__class__"])
    record = draw.choice(
        [
            Forward(number, text, draw.random() < 0.5, draw.random() < 0.5),
            Backward(number, text, number, True, True),
            Release([number] * 1000),
            Drop(text),
            Optimize(text, text),
            Measure(text, text, text),
            Update(text, text, text, 0.5),
            Build(text, draw.choice([text, "os:system", "torch:load", "Slow.__init__"]), text, number),
            Join(text, text),
            Leave(),
        ]
    )
    noise = torch.frombuffer(bytearray(draw.randbytes(draw.randrange(1, 60))), dtype=torch.uint8)

    def packed(value: object) -> torch.Tensor:
        return torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)

    values = [
        [],
        [noise],
        [packed([None, []]), noise],  # more tensors than it says
        [packed([None, [[torch.float32, [10**6, 10**6], False]]]), noise],
        [packed([None, [[torch.float32, [-1], False]]]), noise],
        [packed([None, [["float32", [1], False]]]), noise[:1].repeat(4)],
        [packed([None, [[torch.int64, [1], True]]]), noise[:1].repeat(8)],
        [packed([3, [], 4])],
        [packed({"a": [[]] * 50})],
        [torch.zeros(1 << 17, dtype=torch.float64)],  # more than a message may have
        [torch.zeros((1 << 20) + 1, dtype=torch.uint8)],
        written(NOTHING),
        written(taken_apart(([], {}), False)),
        written(taken_apart(((torch.ones(2, 3), 0.0), {"self": 3}), False)),
        written(taken_apart((("not", "tensors", {1: 2}), {}), False)),
    ]
    return record, draw.choice(values)


def hostile(draw: random.Random, address: Address, known: str) -> None:
    """Talks to the owner as no client does: as a stranger, or with the token."""
    if draw.random() < 0.3:
        one_try(draw, address)
        return
    session = call(address, KEY, TO_CLIENT, 5.0, shared=draw.random() < 0.2)
    with suppress(ShoalError, ValueError):
        if draw.random() < 0.7:
            first = Build("me", "Slow", "", 0) if draw.random() < 0.9 else Join("me", known)
            session.send(first, *written(taken_apart(((), {}), False)))
            session.receive(2.0)
        for _ in range(draw.randrange(1, 4)):
            record, tensors = bad_messages(draw)
            session.send(record, *tensors)
            if draw.random() < 0.5:
                session.receive(0.05)
                session.skip()
    session.close()


def fuzz(tries: int) -> None:
    draw = random.Random(0)
    with owner() as here:
        address = Address.read(here.address)
        good = [remote(here.address, Slow, token=TOKEN, seed=0, shared=shared) for shared in (True, False)]
        torch.manual_seed(0)
        near = Slow()
        for number in range(tries):
            hostile(draw, address, next(iter(here._registry._entries)))
            x, y = (torch.full((1, 3), float(number), requires_grad=True) for _ in range(2))
            good[number % 2](x, 0.0).pow(2).sum().backward()
            near(y, 0.0).pow(2).sum().backward()
            assert torch.equal(x.grad, y.grad)
        until(lambda: here.holdings().clients == 2)
        assert here.holdings().graphs == 0
        assert {type(entry.exposed.module) for entry in here._registry._entries.values()} == {Slow}


def test_what_nobody_should_send_does_not_disturb_an_owner():
    fuzz(60)


@pytest.mark.matrix
def test_what_nobody_should_send_in_two_thousand_tries():
    fuzz(2000)

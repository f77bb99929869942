"""What no row of the engine comes to, or hides by a later wait: each use returns numbers to compare (see `uses`)."""

from __future__ import annotations

import gc
import time
from collections import Counter
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal import Engine, Plan, as_ddp_hook
from shoal.chunks.activations_on_host import OnHost
from shoal.chunks.tier import Tier
from shoal.comm import Group, World
from shoal.comm.ledger import Ledger
from shoal.comm.simulation import simulate_world
from shoal.models import causal_lm
from shoal.parallel.expert.dispatch import Dispatch
from shoal.plan import Option
from shoal.training.no_flush import NoFlushRunner
from tests.device.adapters import in_group
from tests.device.uses import engine, on, trained
from tests.parity.cases import text


def products_while_tokens_travel(world: World, folder: str) -> list[float]:
    return trained(world, 2, {"tp": world.size}, tensor_rules={"": "overlap"})


def around_the_ring(world: World, folder: str) -> list[float]:
    return trained(world, 2, {"cp": world.size, "context": "ring"})


def a_gradient_that_is_copied_to_travel(world: World, folder: str) -> list[float]:
    """Gradients of rows that are not contiguous: the copy that is sent has no other owner."""
    dispatch = Dispatch(world.everyone, 2 * world.size, world.lane())
    x_ND = torch.arange(24.0, device=world.device).view(6, 4).requires_grad_()
    index_NK = (torch.arange(6, device=world.device) % (2 * world.size)).unsqueeze(1)

    def alike(rows: Tensor, experts: Tensor, ones: Tensor) -> Tensor:
        return rows.sum(1, keepdim=True).expand(-1, 4) * 1.0

    y_ND = dispatch(alike, x_ND, index_NK, torch.ones(6, 1, device=world.device), lambda: None)
    y_ND.sum().backward()
    assert x_ND.grad is not None
    return [y_ND.sum().item(), x_ND.grad.sum().item()]


def given_up_before_it_is_asked_for(world: World, folder: str) -> list[float]:
    """Of two tensors on the host one is brought back, and the one before it, which nobody needs by then."""
    keeper = OnHost(1.0, world.lane(), Tier("host"), None)
    first, second = (keeper.save(torch.full((1 << 14,), number, device=world.device)) for number in (1.0, 2.0))
    assert first is not None and second is not None
    back = keeper.restore(second, world.device, True)
    del first
    return [float(back.sum())]


def spans(world: World, folder: str) -> list[float]:
    """Spans on the device's clock: each begins after the host has asked for it."""
    ledger = Ledger(world.device)
    ledger.recording = True
    x, asked = torch.ones(64, 64, device=world.device), []
    for _ in range(3):
        asked.append(time.time())
        with ledger.span("compute", "product"):
            x = x @ x / 64
        time.sleep(0.02)
    found = [span.start >= each - 0.002 for span, each in zip(ledger.take(), asked, strict=True)]
    return [*map(float, found), float(x.sum())]


def recorded(world: World, folder: str) -> list[float]:
    """Steps whose spans are recorded: each ends after it began, and within the run."""
    running = engine(world)
    running.ledger.recording = True
    began = time.time()
    losses = on(running, 2)
    taken = running.ledger.take()
    inside = all(began - 0.1 < span.start <= span.start + span.seconds < time.time() + 0.1 for span in taken)
    return [*losses, float(inside), float(len(taken) > 0)]


def saved_aside(world: World, folder: str) -> list[float]:
    """A save that goes on while the next steps change what it copied."""
    running = engine(world)
    losses = on(running, 1)
    running.save(folder, wait=False)
    losses += on(running, 3)
    running.close()
    fresh = engine(world)
    fresh.load(folder)
    return losses + on(fresh, 2)


def saved_under_way(exchange: Option, world: World, folder: str) -> list[float]:
    """A save while the exchange works in the background on what is saved."""
    running = engine(world, {"dp": world.size, "exchange": exchange})
    losses = on(running, 2)
    running.settle()
    running.save(folder)
    losses += on(running, 3)
    running.settle()
    running.close()
    return losses


def moved_at_once(world: World, folder: str) -> list[float]:
    """Replicas that average how far they have moved, and go on from there at once."""
    return trained(world, 4, {"dp": world.size, "exchange": {"name": "diloco", "every": 2}})


def cut_short(plan: dict[str, Any], world: World, folder: str) -> list[float]:
    """A step that ends within its last backward, when most gradients are on their way."""
    running = engine(world, plan)
    losses, microbatches = on(running, 2), count()

    def fails(gradient: Tensor) -> None:
        if next(microbatches) == 1:  # the last of the step
            raise ZeroDivisionError

    first = next(parameter for parameter in running.module.parameters() if parameter.requires_grad)
    handle = first.register_hook(fails)
    try:
        on(running, 3)
    except ZeroDivisionError:
        handle.remove()
    return losses + on(running, 3)


def cut_short_with_weights_under_way(world: World, folder: str) -> list[float]:
    """A step that ends within its forward, while the weights of the next block come."""
    running = engine(world, {"memory": {"chunk": "4KiB"}})
    losses = on(running, 2)
    handle = running.module.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    try:
        on(running, 3)
    except ZeroDivisionError:
        handle.remove()
    return losses + on(running, 3)


def given_up(plan: dict[str, Any], world: World, folder: str) -> list[float]:
    """An engine that nobody has any more, and has not closed, while work of its steps is under way; another one takes
    its memory."""
    running = engine(world, plan)
    for batch in running.batches(text(), steps=2):
        running.step(batch)
    del running, batch
    gc.collect()
    return trained(world, 2)


def reserved(world: World, folder: str) -> list[float]:
    """Bytes that the allocator has taken for steps in which gradients are on loan: many small ones."""
    plan = {"dp": world.size, "zero": 2, "exchange": {"name": "allreduce", "chunk_bytes": 4096}}
    running = engine(world, plan)
    for batch in running.batches(text(), steps=3):
        running.step(batch)
    running.close()
    return [float(torch.accelerator.memory_reserved())]


class Given(nn.Module):
    """Gives its parameter as it is."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self) -> Tensor:
        return self.value


class InTwoKinds(nn.Module):
    """Layers in fp32, of which DDP makes other buckets after the first step, and a factor in fp64, whose bucket
    stays."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.factor = Given(torch.ones(512, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.double().mean() * self.factor()


def first_bucket_stays(world: World, folder: str) -> list[float]:
    """DDP makes its buckets anew, and the first one is on its way when the others turn out to be others."""
    with in_group(world, folder):
        torch.manual_seed(3)
        ddp = DistributedDataParallel(InTwoKinds().to(world.device), bucket_cap_mb=0.001)
        ddp.register_comm_hook(*as_ddp_hook({"name": "topk", "ratio": 0.25}, ddp))
        optimizer, losses = torch.optim.SGD(ddp.parameters(), lr=0.1), []
        for step in range(4):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + world.rank)).to(world.device)
            optimizer.zero_grad(set_to_none=False)
            loss = (ddp(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()


class InStages(nn.Module):
    """A model whose first stage gives a parameter, as it is, to the blocks of the next one; `tied`: and has the weight
    of the last one, to which it adds no gradient."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(61, 16)
        self.scale = Given(torch.ones(16))
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))
        self.head = nn.Linear(16, 61, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x, scale = self.tokens(input_ids), self.scale()
        if self.head.weight is self.tokens.weight:
            x = x.detach()
        for block in self.blocks:
            x = block(x, scale)
        return self.head(x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * scale


def in_stages(world: World, schedule: str, tied: bool) -> Engine:
    plan = Plan(pp=2, schedule=schedule)
    adamw = partial(torch.optim.AdamW, lr=3e-3)
    return Engine(partial(InStages, tied), causal_lm, adamw, plan, global_batch=12, microbatch=3, world=world)


def a_weight_that_travels(schedule: str, world: World, folder: str) -> list[float]:
    """It is updated, perhaps before all that was sent of it has left."""
    running = in_stages(world, schedule, False)
    losses = on(running, 3)
    running.close()
    return losses


def a_message_that_cannot_be_sent(world: World, folder: str) -> list[float]:
    """The last one of a step, of ranks that are threads: both are told in that step."""
    send, sent = Group.send, Counter[str]()

    def failing(group: Group, tensor: Tensor, dst: int, purpose: str = "") -> None:
        sent[purpose] += 1
        if (purpose, sent[purpose]) == ("backward", 8):  # the second gradient of the fourth microbatch
            raise RuntimeError("the cable is cut")
        send(group, tensor, dst, purpose)

    with patch.object(Group, "send", failing), pytest.raises(RuntimeError) as failure:
        simulate_world(2, lambda rank: on(in_stages(rank, "1f1b", False), 1), device=world.device, timeout=15)
    return [float("the cable is cut" in str(failure.value))]


def hosts_that_agree_late(world: World, folder: str) -> list[float]:
    """Stages without a flush of which one has touched a weight that both have; the hosts take their time to say so."""
    agree = NoFlushRunner._agree

    def late(runner: NoFlushRunner, *args: Any) -> None:
        time.sleep(0.3)
        agree(runner, *args)

    running = in_stages(world, "2bw", True)
    with patch.object(NoFlushRunner, "_agree", late):
        losses = on(running, 4)
        running.close()
    return losses


def ranks_that_are_threads(plan: dict[str, Any], world: World, folder: str) -> list[float]:
    """Two ranks that share a device, and wait for each other on the host."""

    def losses(rank: World) -> list[float]:
        return trained(rank, 3, plan)

    return [loss for each in simulate_world(2, losses, device=world.device) for loss in each]

"""Engines whose updates go through the device where `update = "auto"` finds that faster: on the simulator it never
does, so it is made to. Each use returns numbers to compare (see `uses`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from shoal import Engine, Plan
from shoal.chunks import activations_on_host
from shoal.comm import World
from shoal.device import asked_for
from shoal.errors import BudgetExceeded, UserError
from shoal.models import GPT, causal_lm, regression
from tests.device.budgets import watched
from tests.device.engines import world_of
from tests.device.simulator import Rank
from tests.device.uses import CONFIG, engine, on, trained
from tests.parity.cases import text

CHUNK = "16KiB"
ADAMW, NADAM = partial(torch.optim.AdamW, lr=3e-3), partial(torch.optim.NAdam, lr=3e-3)


@contextmanager
def streams(faster: bool = True) -> Iterator[None]:
    """Inside, updates through the device are found to be `faster`."""
    with mock.patch("shoal.assembly.offload.streams", lambda *_: faster):
        yield


def memory_of(world: World, **more: Any) -> dict[str, Any]:
    return {"dp": world.size, "zero": 3 * (world.size > 1), "memory": {"chunk": CHUNK, **more}}


def one_microbatch(world: World, folder: str) -> list[float]:
    """A step has one, whose gradients autograd gives in bf16."""
    with streams():
        return trained(world, 4, {"dp": world.size, "memory": {}}, precision="bf16", microbatch=12)


def clipped_by_value(world: World, folder: str) -> list[float]:
    """Several microbatches, of which the gradients on the host are clipped before they go to the device."""
    with streams():
        return trained(world, 2, memory_of(world), precision="bf16", clip=None, clip_value=0.002)


def counts(running: Engine) -> list[torch.Tensor]:
    """Of the steps of each parameter."""
    return [values["step"] for values in running.optimizer.torch.state.values()]


def saved_and_under_other_plans(world: World, folder: str) -> list[float]:
    """A run goes on with its checkpoint, and under plans that do not stream, and that do again."""
    with streams():
        first = engine(world, memory_of(world), precision="bf16")
        losses = on(first, 2)
        first.save(folder, wait=False)
        losses += on(first, 1)
        first.close()
        running = engine(world, memory_of(world), precision="bf16")
        running.load(folder)
        assert {each.device for each in counts(running)} == {running.device}, "a fused kernel reads them there"
        losses += on(running, 1)
        for plan in ({"dp": world.size}, memory_of(world, update="deferred"), memory_of(world)):
            running.replan(Plan(**plan))
            losses += on(running, 1)
        running.close()
    return losses


def half_frozen() -> GPT:
    model = GPT(CONFIG)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name or name.startswith("head"))
    return model


def frozen(plan: dict[str, Any], world: World, folder: str) -> list[float]:
    """Of a model of which some weights are not trained."""
    with streams():
        running = Engine(
            half_frozen, causal_lm, ADAMW, Plan(**plan), world=world, global_batch=12, microbatch=3, precision="bf16"
        )
        losses = on(running, 3)
        running.close()
    return losses


def scaled(faster: bool, world: World, folder: str) -> list[float]:
    """fp16, whose first steps overflow and are skipped; the device has room for all."""
    precision = {"name": "fp16", "initial_scale_power": 24, "hysteresis": 1}
    with streams(faster):
        running = engine(world, memory_of(world, device=1 << 30), precision=precision)
        results = [running.step(batch) for batch in running.batches(text(), steps=8)]
        skipped = [float(result.skipped) for result in results]
        assert 0 < sum(skipped) < len(results)
        losses = [result.loss for result in results]
        running.close()
    return [*skipped, *losses]


def staying(keep: str, optimizer: Any, world: World, folder: str) -> list[float]:
    """From the second step on all chunks are on the device, which has room for them; then the run is saved and goes
    on."""
    precision, plan = {"name": "bf16", "master": keep}, memory_of(world, device=1 << 30, update="deferred")
    running = engine(world, plan, optimizer, precision=precision, microbatch=12)
    losses = on(running, 2)
    assert not any(chunk.passes for chunk in running.parts.chunks)
    running.save(folder)
    losses += on(running, 1)
    running.close()
    again = engine(world, plan, optimizer, precision=precision, microbatch=12)
    again.load(folder)
    losses += on(again, 1)
    again.close()
    return losses


def stages(world: World, folder: str) -> list[float]:
    with streams():
        return trained(world, 2, {"pp": world.size, "memory": {"chunk": CHUNK}}, precision="bf16")


def one_stage_with_fp32(world: World, folder: str) -> list[float]:
    """A plan that only one stage cannot stream is refused on all ranks."""
    plan, precision = Plan(pp=world.size, memory={"update": "streamed"}), "bf16"
    try:
        Engine(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
            regression, ADAMW, plan, world=world, global_batch=4, microbatch=2, precision=precision,
        )  # fmt: skip
    except UserError as error:
        return [float("goes with bf16 or fp16 and whole masters" in str(error))]
    return []


def activations_of_short_microbatches(world: World, folder: str) -> list[float]:
    """Half of what backward keeps waits on the host; the last microbatch of a step is short."""
    with streams(), mock.patch.object(activations_on_host, "WORTH", 256):
        running = engine(world, memory_of(world, activations=0.5), precision="bf16", microbatch=5)
        losses = on(running, 3)
        running.close()
    return losses


class Rows(nn.Module):
    """A sparse embedding, which stays on the device, below a layer whose masters are on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(61, 32, sparse=True), nn.Linear(32, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.rows(ids))
        return logits


def sparse_rows(faster: bool, world: World, folder: str) -> list[float]:
    with streams(faster):
        running = Engine(
            Rows, causal_lm, ADAMW, Plan(memory={}), world=world, global_batch=12, microbatch=12, precision="bf16"
        )
        losses = on(running, 3)
        running.close()
    return losses


def kept_by_a_buddy(world: World, folder: str) -> list[float]:
    """Gradients on the host go to another rank's memory as soon as they are reduced; then one rank goes on with what
    the other has of it."""
    plan = {**memory_of(world), "buddy": 2}
    running = engine(world, plan)
    losses = on(running, 3)
    buddy = running.parts.buddy
    assert buddy is not None and buddy._kept is not None
    kept = [float(each.double().abs().sum()) for _, room in buddy._kept.log.values() for each in room.theirs]
    running.close()
    return [*losses, *kept]


def on_the_host_at_once(optimizer: Any, world: World, folder: str) -> list[float]:
    """torch's own fused kernels on the host, of optimizers that ours is not for."""
    return trained(world, 2, {"dp": world.size, "memory": {"update": "at once"}}, optimizer=optimizer)


# budgets: of one rank, with one microbatch a step or several


def _budgeted(rank: Rank, where: str, device: int | None, faster: bool, microbatch: int) -> Engine:
    plan = {"memory": {"chunk": CHUNK, "device": device}}
    with streams(faster):
        return engine(world_of(rank, where), plan, precision="bf16", microbatch=microbatch)


def needed(rank: Rank, where: str, faster: bool, microbatch: int) -> int:
    """The budget that the refusal of one of a byte asks for."""
    running = _budgeted(rank, where, 1, faster, microbatch)
    try:
        on(running, 1)
    except BudgetExceeded as refusal:
        return refusal.needed
    raise AssertionError("a byte was enough")


def taken(rank: Rank, where: str, device: int | None, faster: bool, microbatch: int) -> tuple[list[float], int, int]:
    """Losses; the most bytes that tensors of the device took in a step; how many chunks are on the device at last."""
    with watched() as seen:
        running = _budgeted(rank, where, device, faster, microbatch)
        seen.clear()
        losses = on(running, 4)
        seen.append(asked_for(running.device))
        stay = sum(not chunk.passes for chunk in running.parts.chunks)
        running.close()
    return losses, max(most for _, most in filter(None, seen)), stay


def begun(rank: Rank, where: str) -> tuple[int, int]:
    """The most bytes of the device while an engine is made, and those of all its masters and optimizer state."""
    world = world_of(rank, where)
    with streams():
        running = engine(world, memory_of(world, update="streamed"), precision="bf16")
    found = asked_for(running.device)
    elements = sum(chunk.size for chunk in running.parts.chunks)
    running.close()
    return (0 if found is None else found[1]), 12 * elements

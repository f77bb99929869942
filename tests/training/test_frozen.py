"""Parameters that are frozen, or learn again, while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan
from shoal.comm import World
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from shoal.models import regression
from tests.exchange import teacher
from tests.pool import run_ranks

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.3)


def frozen_for_a_while(world: World, plan: dict, frozen: Sequence[int]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weights after six steps, of which those `frozen` leave the first layer alone: the engine's, and those by torch
    alone."""
    torch.set_num_threads(1)
    engine = Engine(
        teacher.student, regression, SGD, Plan(dp=world.size, **plan), global_batch=8, microbatch=2, world=world
    )
    plain = teacher.student()
    with engine.whole_weights():
        plain.load_state_dict({name: value.detach().clone() for name, value in engine.parameters.items()})
    optimizer = SGD(plain.parameters())
    for batch in engine.batches(teacher.data(), steps=6):
        for module in (engine.module, plain):
            module[0].requires_grad_(batch.step not in frozen)
        total, count = regression(plain, batch.load(batch.ids))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        engine.step(batch)
    with engine.whole_weights():
        found = {name: value.detach().clone() for name, value in engine.parameters.items()}
    engine.close()
    return {name: (found[name], value.detach()) for name, value in plain.named_parameters()}


@pytest.mark.fast
@pytest.mark.parametrize("frozen", [(2, 3), (0, 1)])
@pytest.mark.parametrize(
    ("size", "plan"), [(1, {}), (2, {}), (2, {"zero": 1}), (2, {"zero": 2}), (1, {"memory": {}})], ids=str
)
def test_what_is_frozen_for_some_steps_is_left_alone_in_them(size, plan, frozen):
    """Also what learns later than others, at whose momentum torch's fused SGD raised an error."""
    for found in simulate_world(size, frozen_for_a_while, plan, frozen):
        for ours, theirs in found.values():
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def frozen_under_an_outer_optimizer(world: World, codec: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first layer when it is frozen, two outer steps later, and after one more in which it learns again."""
    torch.set_num_threads(1)
    engine = teacher.engine(world, {"name": "diloco", "every": 2, "codec": codec, "guard": 0.0})
    seen = []
    for batch in engine.batches(teacher.data(), steps=10):
        engine.module[0].requires_grad_(batch.step not in range(4, 8))
        if batch.step in (4, 8):
            seen.append(engine.parameters["0.weight"].detach().clone())
        engine.step(batch)
    seen.append(engine.parameters["0.weight"].detach().clone())
    engine.close()
    return seen[0], seen[1], seen[2]


@pytest.mark.parametrize("codec", ["fp16", "u4"])
def test_no_outer_momentum_moves_what_is_frozen(codec):
    for frozen, still, again in simulate_world(2, frozen_under_an_outer_optimizer, codec):
        assert torch.equal(frozen, still) and not torch.equal(still, again)


@pytest.mark.fast
@pytest.mark.parametrize("memory", [None, {"device": "1GiB", "chunk": 1000}], ids=str)
@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_what_learns_later_than_others_of_its_chunk(memory, dampening):
    """Chunks that are updated one by one share the state: as many parameters had some as this chunk has. With a
    dampening torch's fused SGD was to be left alone."""
    sgd, plan = partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=dampening), Plan(memory=memory)
    engine = Engine(teacher.student, regression, sgd, plan, global_batch=8, world=World.single("cpu"))
    plain = teacher.student()
    with engine.whole_weights():
        plain.load_state_dict({name: value.detach().clone() for name, value in engine.parameters.items()})
    optimizer = sgd(plain.parameters())
    for batch in engine.batches(teacher.data(), steps=4):
        for module in (engine.module, plain):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(batch.step > 0 or name in ("0.bias", "4.bias"))
        total, count = regression(plain, batch.load(batch.ids))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        engine.step(batch)
    for name, value in engine.optimizer.masters().items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)
    engine.close()


@pytest.mark.fast
def test_what_was_frozen_from_the_beginning_cannot_learn_later():
    """It would have had gradients that nobody took, without a word."""

    def model() -> nn.Module:
        made = teacher.student()
        made[0].requires_grad_(False)
        return made

    engine = Engine(model, regression, SGD, global_batch=8)
    batches = engine.batches(teacher.data())
    engine.step(next(batches))
    engine.module[0].requires_grad_(True)
    with pytest.raises(UserError, match=r"^0\.weight has requires_grad now, and was frozen when the engine was made"):
        engine.step(next(batches))


def under_another_plan(world: World) -> tuple[bool, float, float]:
    """Whether the first layer is frozen still, and how far it and the last one went."""
    engine = Engine(teacher.student, regression, SGD, Plan(dp=2), global_batch=8, microbatch=2, world=world)
    engine.module[0].requires_grad_(False)
    engine.replan(Plan(dp=2, zero=2))
    before = {name: value.detach().clone() for name, value in engine.parameters.items()}
    for batch in engine.batches(teacher.data(), steps=2):
        engine.step(batch)
    moved = {name: float((value.detach() - before[name]).norm()) for name, value in engine.parameters.items()}
    stays = engine.module[0].weight.requires_grad
    engine.close()
    return not stays, moved["0.weight"], moved["4.weight"]


def test_what_is_frozen_stays_so_under_another_plan():
    for frozen, first, last in run_ranks(under_another_plan, 2):
        assert frozen and first == 0 and last > 0

"""Tensors that a constructor keeps in several places are one in the trained module too, which one engine has alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from shoal.chunks import move
from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import regression
from shoal.plan import Plan
from tests.beside import trains_as_plain


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.weights = (self.inner.weight,)  # a tuple does not register it
        self.inner.register_buffer("seen", torch.zeros(()))
        self.other.register_buffer("seen", self.inner.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x @ self.weights[0].T)


@pytest.mark.parametrize("ready", [False, True])
def test_attributes_refer_to_the_parameters_and_buffers_that_are_trained(ready):
    model = Keeps() if ready else Keeps
    sgd = partial(torch.optim.SGD, lr=1e-2)
    engine = Engine(model, regression, sgd, global_batch=2, world=World.single("cpu"))
    module = engine.module
    assert module.weights[0] is module.inner.weight
    assert module.inner.seen is module.other.seen
    engine.close()


class Looks(nn.Module):
    """Has views of its weight, by the side of which it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.seen, self.turned = [self.inner.weight.detach()], self.inner.weight.data[1:].t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.5 * x @ self.seen[0] + (x @ self.turned).sum(1, keepdim=True)


@pytest.mark.parametrize("ready", [False, True])
def test_views_of_parameters_are_of_those_that_are_trained(ready):
    """They were of what the weights had been at first."""
    engine = trains(Looks() if ready else Looks)
    data = [{"inputs": torch.ones(3) * i, "targets": torch.ones(3)} for i in range(4)]
    trains_as_plain(engine, Looks(), lambda plain: torch.optim.SGD(plain.parameters(), lr=0.1), data)


class Taps(nn.Module):
    """Has a view of its weight for a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("seen", self.inner.weight.detach()[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.5 * (x @ self.seen.T).sum(1, keepdim=True)


@pytest.mark.parametrize("ready", [False, True])
def test_a_buffer_that_is_a_view_of_a_parameter_stays_one(ready):
    engine = trains(Taps() if ready else Taps)
    data = [{"inputs": torch.ones(3) * i, "targets": torch.ones(3)} for i in range(4)]
    trains_as_plain(engine, Taps(), lambda plain: torch.optim.SGD(plain.parameters(), lr=0.1), data)
    with pytest.raises(UserError, match="the buffer seen is a view of a weight, which is in memory only while"):
        sgd = partial(torch.optim.SGD, lr=0.1)
        Engine(Taps, regression, sgd, Plan(memory={}), global_batch=4, world=World.single("cpu"))


@pytest.mark.parametrize("model", [Looks, Taps])
def test_views_go_along_where_chunks_are_cut_anew(model):
    engine = trains(model)
    memory = engine._memory
    move(engine.parameters, engine.optimizer.parameters, memory.chunks, memory.maker.make(memory.maker.cut(4)))
    seen = engine.module.seen if model is Taps else engine.module.seen[0]
    with torch.no_grad():
        engine.module.inner.weight.fill_(7)
    assert seen.eq(7).all() and seen.numel() in (6, 9)
    engine.close()


class Tail(nn.Module):
    """A head on an encoder that others may have, too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).tanh())


def trains(model: nn.Module | Callable[[], nn.Module]) -> Engine:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return Engine(model, regression, sgd, global_batch=4, world=World.single("cpu"))


def test_two_engines_do_not_train_one_parameter():
    """The first would have gone on with values that the model no longer had, and learned nothing."""
    encoder = nn.Linear(3, 3)
    first = trains(Tail(encoder))
    with pytest.raises(UserError, match=r"^encoder\.weight is trained by another engine"):
        trains(Tail(encoder))
    first.close()
    second = trains(Tail(encoder))
    second.close()


def test_a_module_goes_from_one_engine_to_the_next_with_its_hooks():
    """While the first one is there, whose own hooks would take the gradients, and whose units the user's would have."""
    data = [{"inputs": torch.ones(3) * i, "targets": torch.ones(3)} for i in range(4)]

    def steps(engine: Engine) -> list[float]:
        losses = [engine.step(batch).loss for batch in engine.batches(data, steps=2)]
        engine.close()
        return losses

    model, seen = Tail(nn.Linear(3, 3)), []
    model.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model.head.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    first = trains(model)
    steps(first)
    fresh = copy.deepcopy(first.module)
    fresh.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    seen.clear()
    assert steps(trains(first.module)) == steps(trains(fresh)) and len(seen) == 2


def test_a_module_whose_weights_were_kept_elsewhere_is_copied_before_its_engine_is_closed():
    """The next engine would have begun from NaN."""
    sgd, plan = partial(torch.optim.SGD, lr=0.1), Plan(memory={})
    data = [{"inputs": torch.ones(3) * i, "targets": torch.ones(3)} for i in range(4)]

    def make(model: nn.Module) -> Engine:
        return Engine(model, regression, sgd, plan, global_batch=4, world=World.single("cpu"))

    first = make(Tail(nn.Linear(3, 3)))
    with pytest.raises(UserError, match=r"copy\.deepcopy of the module, inside engine\.whole_weights\(\)"):
        make(first.module)
    with first.whole_weights():
        fresh = copy.deepcopy(first.module)
    (batch,) = first.batches(data, steps=1)
    expected = first.step(batch).loss
    first.close()
    with pytest.raises(UserError, match=r"^encoder\.weight shows NaN: .* Copy the module before that"):
        make(first.module)
    second = make(fresh)
    assert second.step(batch).loss == expected
    second.close()

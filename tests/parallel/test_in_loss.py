"""Losses that compute with weights outside of the model, or call a part of it by itself, where each rank has a part of
them, or of the rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.comm.simulation import simulate_world
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import GPT, GPTConfig, MoEConfig, causal_lm
from shoal.plan import Plan
from tests.parity.cases import text

pytestmark = pytest.mark.fast
CONFIG = GPTConfig(vocab_size=61, sequence=12, layers=1, d_model=16, heads=2, tied=False)


class Body(nn.Module):
    """A model that a loss may also run part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT(GPTConfig(**{**vars(CONFIG), "moe": MoEConfig(experts=4, balance_loss=0.0)}))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.body(input_ids)


class Outer(nn.Module):
    """The same for rows of which ranks have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.body = GPT(CONFIG)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        return self.body(input_ids, position_ids=position_ids)


def norms(model: nn.Module, mb: Any) -> Any:
    """The weights of norms, which all ranks have: they got their penalty from each of them."""
    total, count = causal_lm(model, mb)[:2]
    return total + count * sum(each.square().sum() for name, each in model.named_parameters() if "norm" in name), count


def norms_beside(model: nn.Module, mb: Any) -> Any:
    total, count = causal_lm(model, mb)[:2]
    penalty = sum(each.square().sum() for name, each in model.named_parameters() if "norm" in name)
    return total, count, {"penalty": penalty}


def small(model: nn.Module, mb: Any) -> Any:
    """A penalty so small that the sums of ranks are alike but for rounding."""
    total, count = causal_lm(model, mb)[:2]
    return total + 1e-6 * sum(each.square().sum() for each in model.parameters()), count


def by_hand(model: nn.Module, mb: Any) -> Any:
    """A product with the head's weight, of which each rank has some rows."""
    seen = []
    hook = model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(mb["input_ids"])
    hook.remove()
    logits = F.linear(seen[0], model.head.weight)
    return F.cross_entropy(logits.flatten(0, 1), mb["labels"].flatten(), reduction="sum"), mb["labels"].numel()


def of_a_part(model: nn.Module, mb: Any) -> Any:
    """As `causal_lm`, by a module in the model."""
    return causal_lm(model.body, mb)


def of_a_part_alone(model: nn.Module, mb: Any) -> Any:
    logits = model.body(mb["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), mb["labels"].flatten(), reduction="sum"), (mb["labels"] >= 0).sum()


def of_a_part_at_its_places(model: nn.Module, mb: Any) -> Any:
    logits = model.body(mb["input_ids"], position_ids=mb.get("position_ids"))
    return F.cross_entropy(logits.flatten(0, 1), mb["labels"].flatten(), reduction="sum"), (mb["labels"] >= 0).sum()


def of_experts(model: nn.Module, mb: Any) -> Any:
    total, count = causal_lm(model, mb)[:2]
    return total + sum(each.square().sum() for name, each in model.named_parameters() if "experts" in name), count


class Coder(nn.Module):
    """Layers of which tp cuts the first by rows and the second by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.coder, self.decoder = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(F.gelu(self.coder(self.embed(input_ids)))))


def of_codes(between: Callable[[torch.Tensor], torch.Tensor], model: Any, mb: Any) -> Any:
    """Calls the layers of a `Coder` by themselves, with something else between them than the model has."""
    logits = model.head(model.decoder(between(model.coder(model.embed(mb["input_ids"])))))
    return F.cross_entropy(logits.flatten(0, 1), mb["labels"].flatten(), reduction="sum"), (mb["labels"] >= 0).sum()


def trained(world: Any, factory: Callable[[], nn.Module], loss: Any, plan: Plan, rules: Any = None) -> list[float]:
    make = partial(torch.optim.SGD, lr=0.1)
    running = Engine(factory, loss, make, plan, global_batch=8, microbatch=4, world=world, tensor_rules=rules)
    try:
        return [running.step(batch).loss for batch in running.batches(text(), steps=3)]
    finally:
        running.close()


@pytest.mark.parametrize("loss", [norms, norms_beside, small, by_hand])
def test_weights_that_ranks_of_tp_share_are_refused_by_name(loss):
    """The first two trained with other gradients than one process, without a message."""
    with pytest.raises(UserError, match=r"plan.tp = 2: the loss computes with .* call the module .* take plan.tp = 1"):
        simulate_world(2, trained, partial(GPT, CONFIG), loss, Plan(tp=2))


def test_a_loss_may_call_a_part_of_a_model_whose_experts_are_spread():
    """It was refused, as if it computed with the experts' weights itself."""
    (one,) = simulate_world(1, trained, Body, of_a_part, Plan())
    for losses in simulate_world(2, trained, Body, of_a_part, Plan(dp=2, ep=2)):
        assert losses == pytest.approx(one, rel=1e-5)


def test_a_penalty_on_experts_is_refused():
    with pytest.raises(UserError, match=r"plan.ep = 2: the loss computes with .*experts.* or take plan.ep = 1"):
        simulate_world(2, trained, Body, of_experts, Plan(dp=2, ep=2))


@pytest.mark.parametrize("between", [partial(F.normalize, dim=-1), partial(torch.softmax, dim=-1)])
def test_a_loss_takes_no_part_of_what_a_layer_gives_for_all_of_it(between):
    """Each rank took the norm of its part: losses and gradients were others, without a message."""
    loss = partial(of_codes, between)
    with pytest.raises(UserError, match=r'the loss calls coder by itself, .*"coder\.\*\*": "whole"'):
        simulate_world(2, trained, Coder, loss, Plan(tp=2))
    (one,) = simulate_world(1, trained, Coder, loss, Plan())
    for losses in simulate_world(2, trained, Coder, loss, Plan(tp=2), {"coder.**": "whole"}):
        assert losses == pytest.approx(one, rel=1e-5)


def test_a_loss_computes_each_element_of_a_part_by_itself():
    (one,) = simulate_world(1, trained, Coder, partial(of_codes, torch.tanh), Plan())
    for losses in simulate_world(2, trained, Coder, partial(of_codes, torch.tanh), Plan(tp=2)):
        assert losses == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("context", ["ulysses", "ring"])
def test_a_part_of_a_model_is_told_the_places_of_tokens_by_the_loss_that_calls_it(context):
    """It took the tokens of each rank for the first ones of their rows: the losses were others, without a message."""
    plan = Plan(cp=2, context=context)
    with pytest.raises(UserError, match=r"plan.cp = 2: the loss calls a part .* or give that part position"):
        simulate_world(2, trained, Outer, of_a_part_alone, plan)
    (one,) = simulate_world(1, trained, Outer, of_a_part_at_its_places, Plan())
    for losses in simulate_world(2, trained, Outer, of_a_part_at_its_places, plan):
        assert losses == pytest.approx(one, rel=1e-5)

"""Experts spread over ranks: tokens travel, values and derivatives are those of one device; what cannot be says why."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Plan
from shoal.comm import Lane
from shoal.comm.functional import deal_out, sum_everywhere
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import GPT, GPTConfig, MoEConfig, causal_lm, from_config
from shoal.models.experts import Experts
from shoal.parallel.expert import Dispatch, Dispatched, mixtures
from shoal.parallel.expert.counts import ExpertCounts
from shoal.parallel.expert.mixtures import Mixture, nearly
from shoal.parallel.tensor.layers import become
from tests.parity.cases import ADAMW, CASES, arguments, derivatives_of, engine
from tests.pool import run_ranks

E, D, F = 4, 6, 10


def experts() -> Experts:
    torch.manual_seed(3)
    made = Experts(E, D, F, "swiglu").double()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def tokens(rank: int, lost: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a rank: 5 + rank tokens, some pairs dropped; `lost`: all of them go to the first two experts."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(5 + rank, D, generator=draw, dtype=torch.float64)
    index = torch.randint(0, 2 if lost else E + 1, (5 + rank, 2), generator=draw)
    return x, index, torch.rand(5 + rank, 2, generator=draw, dtype=torch.float64)


def whole(size: int, lost: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    """What one device gives each rank's tokens; the gradients of the experts, and of the tokens, of the sum of
    squares."""
    made, outputs, inputs = experts(), [], []
    for rank in range(size):
        x, index, weights = tokens(rank, lost)
        inputs.append(x.requires_grad_())
        outputs.append(made(x, index, weights))
    sum(y.square().sum() for y in outputs).backward()
    return outputs, {name: p.grad for name, p in made.named_parameters()}, [x.grad for x in inputs]


def spread(world, meanwhile: bool, lost: bool) -> tuple[Any, ...]:
    made, each = experts(), E // world.size
    for name, parameter in list(made.named_parameters()):
        own = parameter.detach()[world.rank * each : (world.rank + 1) * each].clone()
        setattr(made, name, nn.Parameter(own))
    made.num_experts = each
    lane = Lane(world.device, world.ledger)
    become(made, Dispatched, _dispatch=Dispatch(world.everyone, E, lane))
    x, index, weights = tokens(world.rank, lost)
    x.requires_grad_()
    beside: list[torch.Tensor] = []
    y = made(x, index, weights, (lambda: beside.append(x * 2)) if meanwhile else None)
    (y.square().sum() + sum(part.sum() * 0 for part in beside)).backward()
    lane.close()
    assert len(beside) == meanwhile
    return y.detach(), {name: p.grad for name, p in made.named_parameters()}, x.grad


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("meanwhile", [False, True])
@pytest.mark.parametrize("lost", [False, True], ids=["", "some ranks get no token"])
def test_tokens_come_back_from_where_their_experts_are(size, meanwhile, lost):
    outputs, of_experts, of_tokens = whole(size, lost)
    each = E // size
    for rank, (y, grads, grad) in enumerate(run_ranks(spread, size, meanwhile, lost)):
        torch.testing.assert_close(y, outputs[rank])
        torch.testing.assert_close(grad, of_tokens[rank])
        for name, value in grads.items():
            torch.testing.assert_close(value, of_experts[name][rank * each : (rank + 1) * each])


def maps(world) -> None:
    group = world.everyone
    give = [[1, 2], [0, 3]][world.rank]
    take = [[1, 0], [2, 3]][world.rank]
    x = torch.arange(sum(give) * 2.0, dtype=torch.float64).view(-1, 2) + 10 * world.rank
    dealt = partial(deal_out, group=group, give=give, take=take)
    y, tangent = torch.func.jvp(dealt, (x,), (2 * x,))
    assert torch.equal(tangent, 2 * y)
    assert y[:, 0].tolist() == [[0.0], [2.0, 4.0, 10.0, 12.0, 14.0]][world.rank]
    (gradient,) = torch.autograd.grad((dealt(x.requires_grad_()) * y).sum(), x)
    assert torch.equal(gradient, x)
    total = sum_everywhere(torch.full((1,), 3.0 + world.rank, requires_grad=True), group)
    assert total.item() == 7.0


def test_rows_are_dealt_out_linearly():
    run_ranks(maps, 2)


class Given(nn.Module):
    """Stands for somebody's experts."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pairs_are_counted_as_experts_are_given_them(dtype: torch.dtype) -> None:
    """The number of experts stands for a pair that was dropped; forwards in evaluation are not counted."""
    own, other = Given(), Given()
    found = [Mixture(name, each, None, E) for name, each in (("own", own), ("other", other))]
    counts = ExpertCounts([], found, {own, other}, torch.device("cpu"))
    x, index, _ = tokens(0)
    index[0, 0] = E
    own(x, index.to(dtype))
    own(x, index=index.to(dtype))
    own.eval()(x, index.to(dtype))
    expected = 2 * torch.bincount(index.flatten(), minlength=E + 1)
    row = counts.row()
    assert row.tolist() == [*expected.tolist(), *(E + 1) * [0]]
    assert [each.tolist() for each in counts.read(row)] == [expected.tolist(), (E + 1) * [0]]
    counts.begin()
    assert not counts.row().any()


def test_mixtures_are_found_in_our_models_and_others():
    for case, names in (
        ("moe", ["blocks.0.mlp.experts", "blocks.1.mlp.experts"]),
        ("moe-top1", ["blocks.1.mlp.experts"]),
        ("mixtral", ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]),
        ("gpt", []),
    ):
        found = mixtures(CASES[case].factory())
        assert [mixture.name for mixture in found] == names
        assert all(mixture.router is not None and mixture.number == 4 for mixture in found)


ODD = {
    "longcat_flash": ({"n_routed_experts": 4, "num_layers": 1}, "mlp.experts, .*: it does not say by `num_experts`"),
    "llama4_text": ({"num_hidden_layers": 1}, "feed_forward.experts, .*: its forward does not take .tokens, experts"),
}


@pytest.mark.parametrize("kind", ODD)
def test_experts_of_another_form_are_told_from_those_that_can_be_spread(kind: str):
    pytest.importorskip("transformers")
    settings, said = ODD[kind]
    with torch.device("meta"):
        module = from_config({"model_type": kind, "vocab_size": 64, "hidden_size": 32, **settings})()
    assert not mixtures(module) and re.search(f"^; of model.layers.0.{said}", nearly(module))
    assert not nearly(CASES["gpt"].factory())


def refused(world, case: str, plan: dict[str, Any], more: dict[str, Any]) -> str:
    with pytest.raises(UserError) as failure:
        engine(case, "fp32", 1, world=world, plan=Plan(**plan), **more)
    return str(failure.value)


@pytest.mark.parametrize(
    ("case", "plan", "more", "message"),
    [
        ("gpt", {"dp": 2, "ep": 2}, {}, "GPT has no experts"),
        (
            "moe",
            {"dp": 3, "ep": 3},
            {},
            "has 4 experts, which do not come out even among plan.ep = 3 ranks: take one of [1, 2, 4]",
        ),
        ("moe-capacity", {"dp": 2}, {"microbatch": None}, "experts have a capacity, which is of one microbatch"),
        ("moe", {"dp": 2, "ep": 2}, {"tensor_rules": {"blocks.*.mlp.expert": "experts"}}, "no module of such a name"),
        (
            "moe",
            {"dp": 2, "ep": 2},
            {"tensor_rules": {"blocks.*.mlp.shared": "experts"}},
            "it does not say by `num_experts`",
        ),
        ("moe", {"dp": 2}, {"microbatch": None}, "experts have a balance loss, which is of one microbatch"),
        ("mixtral", {"dp": 2}, {"microbatch": None}, "experts have a balance loss, which is of one microbatch"),
        ("moe-capacity", {"dp": 2, "exchange": "diloco"}, {}, "take a balance loss instead"),
        (
            "moe",
            {"dp": 4, "ep": 2, "exchange": {"name": "hierarchical", "ranks_per_host": 2}},
            {},
            "hosts count as they are",
        ),
        ("moe", {"dp": 2, "ep": 2, "exchange": "diloco"}, {}, "tokens of one would go to experts of another"),
        ("moe", {"dp": 2, "ep": 2, "exchange": "qadam"}, {}, "come from tokens of several"),
        ("moe", {"dp": 2, "ep": 2, "exchange": "adasum"}, {}, "it weighs replicas by products of whole parameters"),
    ],
    ids=str,
)
def test_plans_that_cannot_be_say_why(case, plan, more, message):
    answers = run_ranks(refused, Plan(**plan).size, case, plan, more)
    assert all(message in answer for answer in answers), answers


def penalised(model: Any, mb: Any) -> Any:
    total, count, losses = causal_lm(model, mb)
    return total + count * sum(each.square().sum() for each in model.parameters()), count, losses


def read(world) -> str:
    case, options = CASES["moe"], arguments("fp32", 1)
    running = Engine(case.factory, penalised, case.optimizer, Plan(dp=2, ep=2), world=world, **options)
    with pytest.raises(UserError) as failure:
        running.step(next(running.batches(case.data())))
    running.close()
    return str(failure.value)


def test_a_loss_that_reads_weights_of_experts_is_refused():
    """Each rank weighed its own experts by its own count, half of all."""
    for answer in run_ranks(read, 2):
        assert "blocks.0.mlp.experts.gate_up_proj, of which each rank has the part of its own experts" in answer, answer


@pytest.mark.parametrize(
    ("plan", "message"), [({"dp": 12, "ep": 6, "zero": 1, "shard": 4}, "4 ranks share one copy of the state")]
)
def test_copies_of_the_state_and_experts_fit_each_other(plan, message):
    with pytest.raises(UserError, match=message):
        Plan(**plan)


def exchanged(world, plan: dict[str, Any], exchange: Any) -> list[float]:
    running = engine("moe", "fp64", 1, world=world, plan=Plan(**plan, exchange=exchange))
    losses = [running.step(batch).loss for batch in running.batches(CASES["moe"].data(), steps=6)]
    running.close()
    return losses


@pytest.mark.parametrize(
    ("exchange", "bound"),
    [
        ("hierarchical", 1e-9),
        ("bytegrad", 2e-3),
        ("bf16", 2e-3),
        ("fp16", 2e-3),
        ("powersgd", 5e-2),
        ("topk", 5e-2),
        ("delayed", 1e-9),
    ],
)
def test_exchange_algorithms_go_on_over_those_who_have_the_same_experts(exchange, bound):
    """Exact ones are those of four replicas; lossy ones stay near, and all ranks agree."""
    whole = run_ranks(exchanged, 4, {"dp": 4}, exchange)
    cut = run_ranks(exchanged, 4, {"dp": 4, "ep": 2}, exchange)
    assert all(losses == cut[0] for losses in cut)
    assert cut[0] == pytest.approx(whole[0], rel=bound)


def derivatives(world, plan: dict[str, Any]) -> tuple[Any, ...]:
    # every expert sees every token: no choice that jumps
    model = partial(GPT, GPTConfig(61, 12, 2, 32, 4, moe=MoEConfig(4, 4)))
    options = {"global_batch": 12, "microbatch": 3, "precision": "fp64", "world": world}
    running = Engine(model, causal_lm, ADAMW, Plan(**plan), **options)
    return derivatives_of(running, "gpt")


@cache
def derivatives_alone() -> tuple[Any, ...]:
    return run_ranks(derivatives, 1, {})[0]


@pytest.mark.parametrize("plan", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}], ids=str)
def test_forward_mode_and_products_with_the_hessian_pass_through(plan):
    for ours in run_ranks(derivatives, Plan(**plan).size, plan):
        torch.testing.assert_close(ours, derivatives_alone(), rtol=1e-9, atol=1e-12)


def sent(world, overlap: bool) -> tuple[int, int]:
    """Bytes of payload to and from experts in the second step, and pairs that were chosen."""
    shared = 1 if overlap else 0
    model = partial(GPT, GPTConfig(61, 12, 2, 32, 4, moe=MoEConfig(4, 2, shared=shared)))
    options = {"global_batch": 12, "microbatch": 3, "precision": "fp64", "world": world}
    running = Engine(model, causal_lm, ADAMW, Plan(dp=2, ep=2), **options)
    batches = running.batches(CASES["gpt"].data())
    running.step(next(batches))
    before = world.ledger.total(purpose="experts").payload
    counts = running.step(next(batches)).tokens_per_expert
    return world.ledger.total(purpose="experts").payload - before, sum(map(sum, counts))


@pytest.mark.parametrize("overlap", [False, True])
def test_bytes_are_those_of_the_formula(overlap):
    """Each pair goes out and comes back, forward and backward; a layer and microbatch announce 4 counts."""
    found = run_ranks(sent, 2, overlap)
    pairs = found[0][1]
    assert pairs == 12 * 12 * 2 * 2
    announced = 2 * 2 * 2 * 4 * 8  # ranks, layers, microbatches a rank
    assert sum(payload for payload, _ in found) == 4 * pairs * 32 * 8 + announced

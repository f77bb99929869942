"""The mixture of experts against token by token arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UserError
from shoal.models import GPT, GPTConfig, MoEConfig, build, causal_lm, count_parameters
from shoal.models.experts import Experts, Pairs, by_expert
from shoal.models.moe import MoE, Router, kept

D, F_WIDTH = 8, 6


def mixture(mlp: str = "gelu", **fields) -> MoE:
    torch.manual_seed(0)
    cfg = MoEConfig(**{"experts": 4, **fields})
    moe = MoE(cfg, D, F_WIDTH, mlp, lambda experts: torch.nn.Linear(D, D, bias=experts > 0)).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    return moe


def expert(experts: Experts, number: int, x: torch.Tensor) -> torch.Tensor:
    if experts.mlp == "gelu":
        inner = F.gelu(experts.up_proj[number] @ x, approximate="tanh")
    else:
        gate, up = (experts.gate_up_proj[number] @ x).chunk(2)
        inner = F.silu(gate) * up
    return experts.down_proj[number] @ inner


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize(("per_token", "gate"), [(1, "softmax"), (2, "softmax"), (3, "sigmoid")])
def test_each_token_is_the_weighed_sum_of_its_experts(mlp, per_token, gate):
    moe = mixture(mlp, per_token=per_token, gate=gate)
    x = torch.randn(3, 5, D, dtype=torch.float64)
    y, _ = moe(x)
    for token, found in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
        logits = moe.router.weight @ token
        scores = logits.softmax(0) if gate == "softmax" else logits.sigmoid()
        best = scores.argsort(descending=True)[:per_token]
        weights = scores[best] / (scores[best].sum() if per_token > 1 else 1.0)
        expected = sum(
            weight * expert(moe.experts, int(number), token) for number, weight in zip(best, weights, strict=True)
        )
        torch.testing.assert_close(found, expected)


def test_shared_and_residual_experts_see_every_token():
    moe = mixture(shared=2, residual=True)
    x = torch.randn(2, 4, D, dtype=torch.float64)
    routing = moe.router(x.flatten(0, 1))
    routed = moe.experts(x.flatten(0, 1), routing.experts, routing.weights).view_as(x)
    share = moe.coefficient(x).softmax(-1)
    expected = share[..., :1] * routed + share[..., 1:] * moe.residual(x) + moe.shared(x)
    torch.testing.assert_close(moe(x)[0], expected)


def test_losses_are_those_of_the_papers():
    moe = mixture(per_token=2)
    x = torch.randn(7, D, dtype=torch.float64)
    logits = x @ moe.router.weight.T
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(2).indices
    shares = torch.tensor([(chosen == number).sum() for number in range(4)]) / 14
    balance, z = moe.router(x).losses
    torch.testing.assert_close(balance, 4 * (shares * probabilities.mean(0)).sum())
    torch.testing.assert_close(z, logits.exp().sum(-1).log().square().mean())
    even = mixture(per_token=4)  # all experts of all tokens
    assert even.router(x).losses[0].item() == pytest.approx(1.0)


def one_by_one(chosen: list[list[int]], weights: list[list[float]], capacity: int, drop: str) -> list[list[bool]]:
    pairs = [(slot, token) for slot in range(len(chosen[0])) for token in range(len(chosen))]
    if drop == "probability":
        pairs.sort(key=lambda pair: -weights[pair[1]][pair[0]])
    taken: dict[int, int] = {}
    found = [[False] * len(chosen[0]) for _ in chosen]
    for slot, token in pairs:
        number = chosen[token][slot]
        found[token][slot] = taken.get(number, 0) < capacity
        taken[number] = taken.get(number, 0) + 1
    return found


@pytest.mark.fast
@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(0, 9), st.integers(1, 3), st.integers(0, 4), st.sampled_from(["position", "probability"]))
def test_capacity_keeps_the_first_of_each_expert(data, tokens, k, capacity, drop):
    experts = 4
    chosen = [data.draw(st.permutations(range(experts)))[:k] for _ in range(tokens)]
    weights = [[data.draw(st.sampled_from([0.1, 0.2, 0.3, 0.5])) for _ in range(k)] for _ in range(tokens)]
    index = torch.tensor(chosen, dtype=torch.int64).view(tokens, k)
    found = kept(index, torch.tensor(weights).view(tokens, k), experts, capacity, drop)
    assert found.tolist() == one_by_one(chosen, weights, capacity, drop) if tokens else found.shape == (0, k)


def test_dropped_pairs_count_nothing_and_capacity_is_of_the_microbatch():
    moe = mixture(per_token=1, capacity_factor=0.5)
    x = torch.randn(16, D, dtype=torch.float64)
    routing = moe.router(x)
    assert moe.cfg.capacity(16) == 2
    counts = torch.bincount(routing.experts.flatten(), minlength=5)
    assert counts[:4].max() <= 2 and counts.sum() == 16
    y = moe.experts(x, routing.experts, routing.weights)
    assert torch.equal(y.abs().sum(1) == 0, (routing.experts == 4).squeeze(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [8, 6], ids=["grouped", "one by one"])
def test_products_by_expert(dtype, size):
    counts = [3, 0, 4, 2]
    rows, weights = (
        torch.randn(9, 8, dtype=dtype, requires_grad=True),
        torch.randn(4, size, 8, dtype=dtype, requires_grad=True),
    )
    y = by_expert(rows, weights, counts)
    expected = torch.cat([part @ weight.T for part, weight in zip(rows.split(counts), weights, strict=True)])
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y, expected, rtol=bound, atol=bound)
    direction = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(each, (rows, weights), direction) for each in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=10 * bound)


def test_pairs_come_sorted_and_go_back():
    index = torch.tensor([[2, 0], [3, 1], [0, 3]])
    pairs = Pairs(index, 3)
    assert pairs.counts == [2, 1, 1] and pairs.tokens.tolist() == [0, 2, 1, 0]
    rows = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    weights = torch.tensor([[0.5, 1.0], [9.0, 2.0], [3.0, 9.0]])
    assert pairs.combine(rows, weights).tolist() == [[0.5 * 4 + 1], [2 * 3], [3 * 2]]


def test_no_tokens_at_all():
    moe = mixture(capacity_factor=1.0, shared=1)
    y, losses = moe(torch.zeros(0, 3, D, dtype=torch.float64))
    assert y.shape == (0, 3, D) and losses.isfinite().all()


def test_a_bias_evens_out_what_it_does_not_weigh():
    moe = mixture(per_token=1, balance_rate=0.05, normalize=False)
    x = torch.randn(200, D, dtype=torch.float64)
    before = None
    for _ in range(200):
        routing = moe.router(x)
        counts = torch.bincount(routing.chosen.flatten(), minlength=4).double()
        before = counts if before is None else before
        moe.router.balance(counts)
    assert counts.max() < 1.2 * 50 < before.max()
    scores = (x @ moe.router.weight.T).softmax(-1)
    torch.testing.assert_close(routing.weights, scores.gather(1, routing.chosen))


@pytest.mark.parametrize("noise", ["jitter", "gaussian", "gumbel"])
def test_noise_changes_choices_while_training_only(noise):
    router = Router(MoEConfig(8, 1, noise=noise), D)
    torch.nn.init.normal_(router.weight, std=0.01)
    x = torch.randn(500, D)
    first, second = router(x), router(x)
    assert not torch.equal(*((each.weights if noise == "jitter" else each.chosen) for each in (first, second)))
    router.eval()
    assert torch.equal(router(x).chosen, router(x).chosen) and torch.equal(router(x).weights, router(x).weights)


def test_gumbel_draws_by_probability():
    router = Router(MoEConfig(3, 1, noise="gumbel"), 1)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.5], [0.3], [0.2]]).log())
    counts = torch.bincount(router(torch.ones(20_000, 1)).chosen.flatten(), minlength=3) / 20_000
    torch.testing.assert_close(counts, torch.tensor([0.5, 0.3, 0.2]), atol=0.02, rtol=0)


def test_the_router_computes_in_fp32_where_the_model_does_not():
    router = Router(MoEConfig(4), D).bfloat16()
    torch.nn.init.normal_(router.weight)
    found = router(torch.randn(5, D).bfloat16())
    assert found.weights.dtype == torch.float32 and found.losses.dtype == torch.float32


MODELS = [
    {"experts": 4},
    {"experts": 4, "every": 2, "d_ff": 16, "shared": 2},
    {"experts": 2, "per_token": 1, "residual": True, "shared": 1},
]


@pytest.mark.parametrize("moe", MODELS, ids=str)
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gpt_with_experts_has_as_many_parameters_as_the_formula_says(moe, mlp, bias):
    cfg = GPTConfig(61, 12, 2, 32, 4, mlp=mlp, bias=bias, moe=MoEConfig(**moe))
    assert sum(parameter.numel() for parameter in GPT(cfg).parameters()) == count_parameters(cfg)


def test_auxiliary_losses_come_with_their_factors():
    torch.manual_seed(0)
    model = GPT(GPTConfig(61, 12, 2, 32, 4, moe=MoEConfig(4, balance_loss=0.5, z_loss=0.25)))
    rows = {"input_ids": torch.randint(0, 61, (3, 12)), "labels": torch.randint(0, 61, (3, 12))}
    total, count, losses = causal_lm(model, rows)
    assert count == 36 and total.item() == pytest.approx(36 * math.log(61), rel=0.05)
    assert losses["router"].item() == pytest.approx(0.5, rel=0.05)  # 1 where all experts are alike
    assert losses["router_z"].item() == pytest.approx(0.25 * math.log(4) ** 2, rel=0.05)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"experts": 2, "per_token": 3}, "model.moe.per_token = 3 of MoE is more than experts = 2"),
        ({"experts": 4, "gate": "softmx"}, 'Did you mean "softmax"'),
        ({"experts": 4, "per_tokn": 1}, 'model.moe.per_tokn is not a setting of gpt .* Did you mean "per_token"'),
        ({"experts": "4"}, "model.moe.experts = '4' of gpt must be an integer"),
        ({"per_token": 2}, "model 'gpt' needs moe.experts"),
        ({"experts": 4, "capacity_factor": 0.0}, "model.moe.capacity_factor = 0.0 of MoE must be greater than 0"),
        ({"experts": 4, "every": 9}, "model.moe.every = 9 of GPT: of 5 layers none is every 9th; give at most layers"),
        ({"experts": 4, "z_loss": -1.0}, "model.moe.z_loss = -1.0 of MoE must be at least 0"),
    ],
    ids=str,
)
def test_wrong_settings_of_a_job_are_named(table, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        build({"name": "gpt", "preset": "1m", "moe": table})


def test_a_job_says_its_experts_in_a_table():
    values = build({"name": "gpt", "preset": "1m", "moe": {"experts": 4, "shared": 1}}).values
    assert values["moe"]["experts"] == 4 and values["moe"]["per_token"] == 2

"""Placements of operations: what is legal computes the same, and what is found is the best there is."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.parallel.tensor.graph.select import HANDLERS, followed
from shoal.parallel.tensor.graph.strategies import SUM, WHOLE, Lies, Strategy, Ways
from shoal.parallel.tensor.graph.trace import Op, fake_mode, trace
from shoal.planner.elimination import cheapest
from shoal.planner.operators import problem_of
from shoal.planner.placements import best, redistributed
from tests.planner.placing import MODELS, by_milp, rates, trace_of
from tests.planner.untied import untied

RANKS = 2


def test_elimination_finds_the_best_of_all_choices():
    draw = np.random.default_rng(0)
    for case in range(40):
        sizes = draw.integers(1, 4, size=6)
        alone = [draw.random(size) for size in sizes]
        together = [(one, other) for one in range(6) for other in range(one) if draw.random() < 0.5]
        pairs = {(one, other): draw.random((sizes[one], sizes[other])) for one, other in together}

        def total(chosen, alone=alone, pairs=pairs):
            mine = sum(costs[at] for costs, at in zip(alone, chosen, strict=True))
            return mine + sum(costs[chosen[one], chosen[other]] for (one, other), costs in pairs.items())

        chosen, found = cheapest(alone, pairs)
        assert found == pytest.approx(min(map(total, product(*map(range, sizes))))), case
        assert total(chosen) == pytest.approx(found), case


class Everything(nn.Module):
    """Operations of all kinds; channels, heads, widths and tokens come out even for two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.wide, self.qkv = nn.Embedding(12, 8), nn.Linear(8, 12), nn.Linear(12, 24)
        self.norm, self.conv = nn.LayerNorm(8), nn.Conv2d(4, 6, 1)
        self.groups = nn.GroupNorm(2, 6)

    def forward(self, ids: Tensor, picture: Tensor) -> Tensor:
        x = self.norm(self.words(ids) * 2.0)
        q, k, v = self.qkv(F.gelu(self.wide(x))).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (4, 2)).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = (y @ k.transpose(-1, -2)).softmax(-1) @ v
        side = self.groups(self.conv(picture)).mean((2, 3))
        return torch.cat([y.transpose(1, 2).flatten(2) + x, x], -1).sum(1)[:, :6] + side


def part(value: Tensor, lies: Lies, rank: int) -> Tensor:
    """What a rank has of a tensor that lies so; of summands the first one has all."""
    if lies.what == "sum":
        return value if rank == 0 else torch.zeros_like(value)
    if lies == WHOLE:
        return value
    pieces = [value.narrow(lies.dim, a + rank * (b - a), b - a) for a, b in lies.stretches]
    return torch.cat(pieces, lies.dim)


def check(op: Op, way: Strategy, values: dict[int, Tensor]) -> bool:
    """Runs an operation whole and by ranks; False where its arguments are sizes of the whole."""
    given = [values[id(each)] for each in op.inputs]

    def run(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in tensors]
        by_id = {id(each): leaf for each, leaf in zip(op.inputs, leaves, strict=True)}
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, lambda each: by_id[id(each)], (op.args, op.kwargs))
        result = op.func(*args, **kwargs)
        return leaves, list(result) if isinstance(result, list | tuple) else [result]

    leaves, wanted = run(given)
    weights = [torch.randn(each.shape, dtype=torch.float64) for each in wanted]
    sum((each * by).sum() for each, by in zip(wanted, weights, strict=True)).backward()
    totals, gradients = [torch.zeros_like(each) for each in wanted], [torch.zeros_like(each) for each in given]
    for rank in range(RANKS):
        tensors = [part(each, lies, rank) for each, lies in zip(given, way.inputs, strict=True)]
        if op.name == "embedding" and SUM in way.outputs:  # each looks up its own rows
            rows = torch.zeros_like(given[0])
            rows[rank * 6 : rank * 6 + 6] = tensors[0]
            tensors[0] = rows
        if SUM in way.outputs and way.name == "row" and len(tensors) == 3:  # the bias is added once
            tensors[2] = tensors[2] * (rank == 0)
        try:
            own, results = run(tensors)
        except RuntimeError:
            return False
        for at, (result, lies) in enumerate(zip(results, way.outputs, strict=True)):
            if lies == SUM:
                totals[at] += result
            elif result.shape != part(wanted[at], lies, rank).shape:
                return False
            else:
                assert torch.allclose(result, part(wanted[at], lies, rank)), (op.name, way)
        loss = [
            (each * part(by, lies.dual, rank)).sum()
            for each, by, lies in zip(results, weights, way.outputs, strict=True)
        ]
        sum(loss).backward()
        for at, (leaf, lies) in enumerate(zip(own, way.gradients, strict=True)):
            if leaf.grad is not None and lies == SUM:
                gradients[at] += leaf.grad
            elif leaf.grad is not None and leaf.shape == part(given[at], lies, rank).shape and way.name != "row":
                assert torch.allclose(leaf.grad, part(leaves[at].grad, lies, rank)), (op.name, way)
    for total, whole, lies in zip(totals, wanted, way.outputs, strict=True):
        assert lies != SUM or torch.allclose(total, whole), (op.name, way)
    for total, leaf, lies in zip(gradients, leaves, way.gradients, strict=True):
        assert lies != SUM or leaf.grad is None or torch.allclose(total, leaf.grad), (op.name, way)
    return True


def test_each_strategy_computes_what_one_rank_does():
    """Values and gradients: parts are those of the whole, and summands add up to it."""
    module = Everything()
    mode = fake_mode(module)
    with mode:
        given = torch.zeros(4, 6, dtype=torch.long), torch.randn(4, 4, 4, 4)
    seen = trace("", module, given, {}, mode)
    ways = Ways(followed(seen, list(module.parameters()), False), HANDLERS, RANKS)
    torch.manual_seed(0)
    checked: set[tuple[str, str]] = set()
    for op in seen.ops:
        values = {
            id(each): torch.randn(each.shape, dtype=torch.float64)
            if each.is_floating_point()
            else torch.randint(12, each.shape)
            for each in op.inputs
        }
        checked |= {(op.name, way.name) for way in ways.of(op) if check(op, way, values)}
    for name, wanted in {
        "embedding": "whole vocabulary column data sequence",
        "linear": "whole column row data sequence",
        "scaled_dot_product_attention": "whole heads data",
        "softmax": "whole data",
        "layer_norm": "whole data sequence",
        "conv2d": "whole column row data",
        "group_norm": "whole data",
        "add": "whole data sequence sum",
        "mul": "whole data sequence sum part",
        "cat": "whole data sequence sum",
        "gelu": "whole part data sequence",
    }.items():
        assert {(name, way) for way in wanted.split()} <= checked, (name, sorted(checked))
    assert ("gelu", "sum") not in checked and ("layer_norm", "part") not in checked


@pytest.mark.matrix
@pytest.mark.parametrize("bandwidth", [1e12, 3e10, 1e9])
@pytest.mark.parametrize("name", [*MODELS, "opt", "mistral", "t5", "vit", "torchvision resnet18"])
def test_what_is_found_is_the_optimum_of_the_integer_program(name: str, bandwidth: float):
    problem = problem_of(trace_of(name), rates(bandwidth))
    found = best(problem)
    assert found.seconds == pytest.approx(by_milp(problem), rel=1e-6)


QUICK = ("mlp", 3e10), ("gpt", 1e12)


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        *QUICK,
        *(
            pytest.param(name, bandwidth, marks=pytest.mark.matrix)
            for name in (*MODELS, "opt", "mistral", "t5", "vit", "torchvision resnet18")
            for bandwidth in (1e12, 3e10, 1e9)
            if (name, bandwidth) not in QUICK
        ),
    ],
)
def test_what_tying_backward_to_forward_loses_is_counted(name: str, bandwidth: float):
    trace = trace_of(name)
    tied, free = (best(made(trace, rates(bandwidth))).seconds for made in (problem_of, untied))
    loses = tied / free - 1
    assert -1e-9 < loses < (0.07 if name == "mlp" else 0.005)
    assert loses > 0.06 or (name, bandwidth) != ("mlp", 3e10), "there it does lose something"


def layers(name: str, bandwidth: float, **others: object) -> dict[str, str]:
    return dict(best(problem_of(trace_of(name, 16), rates(bandwidth)), without={"data", "sequence"}, **others).layers)  # type: ignore[arg-type]


def test_pairs_are_cut_over_a_fast_link_and_nothing_over_a_slow_one():
    assert layers("mlp", 1e12) == {"up": "column", "down": "row"}
    assert layers("mlp", 1e8) == {"up": "whole", "down": "whole"}
    fast = layers("gpt", 1e12)
    for block in range(2):
        assert fast[f"blocks.{block}.attention.qkv"] == fast[f"blocks.{block}.mlp.up"] == "column"
        assert fast[f"blocks.{block}.attention.out"] == fast[f"blocks.{block}.mlp.down"] == "row"
    assert set(layers("gpt", 1e8).values()) == {"whole"}


def test_what_is_fixed_stays_and_the_rest_is_found():
    assert layers("mlp", 1e8, fixed={"up": "column"})["down"] == "row"
    with pytest.raises(ValueError, match="up may be whole, data, sequence, row, column, not heads"):
        layers("mlp", 1e8, fixed={"up": "heads"})


def test_less_memory_has_more_cut():
    problem = problem_of(trace_of("gpt"), rates(1e8))
    free = best(problem)
    for share in (0.9, 0.7):
        kept = best(problem, limit=share * free.weights)
        assert kept.weights <= share * free.weights and kept.seconds > free.seconds
        within = [
            each
            for each in (best(problem, price=10.0**-power) for power in range(6, 16))
            if each.weights <= share * free.weights
        ]
        assert kept.seconds <= min(each.seconds for each in within)
    with pytest.raises(ValueError, match="no placements leave a rank"):
        best(problem, limit=0.4 * free.weights)


def test_redistribution_costs_its_cheapest_route():
    over, nbytes = rates(1e9, 4, 1e-3), 1 << 20
    cut, other = Lies("cut", 0, ((0, 1),)), Lies("cut", 1, ((0, 1),))
    copied = over.copied(nbytes)
    assert redistributed(nbytes, WHOLE, WHOLE, over) == 0.0
    assert redistributed(nbytes, SUM, WHOLE, over) == pytest.approx(6e-3 + 1.5 * nbytes / 1e9 + copied)
    assert redistributed(nbytes, SUM, cut, over) == pytest.approx(3e-3 + 0.75 * nbytes / 1e9 + copied / 4)
    assert redistributed(nbytes, cut, WHOLE, over) == pytest.approx(3e-3 + 0.75 * nbytes / 1e9 + copied)
    assert redistributed(nbytes, cut, other, over) == pytest.approx(1e-3 + 0.75 * nbytes / 4 / 1e9 + copied / 4)
    assert redistributed(nbytes, WHOLE, cut, over) == pytest.approx(copied / 4)

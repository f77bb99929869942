"""Gradients of which a rank keeps its stretch alone, on ranks with several stages: each backward sends those of its own
stage, where replicas make the same ones, and the numbers are those of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal import Engine, Plan
from shoal.comm import World
from shoal.jobs.moves import GRADIENTS, Moves
from tests.pool import RankError, apart, reference, run_ranks

WIDTH = 8
MICROBATCHES = 3
ADAM = partial(torch.optim.Adam, lr=0.01)
SMALL = {"name": "allreduce", "chunk_bytes": 8 * WIDTH * WIDTH}
"""A chunk of each matrix."""


def layer() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


class Deep(nn.Module):
    """Eight equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x).tanh()
        return x


class Tied(Deep):
    """The first and the last layer share a weight, which under "zbv" one rank has, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7].weight = self.layers[0].weight


class Loose(Deep):
    """One parameter is in no layer, and so in all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale) * self.scale


class Idle(Deep):
    """The second half is frozen, and a layer of the first one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[4:].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for place, each in enumerate(self.layers):
            x = x if place == 1 else each(x).tanh()
        return x


class Borrows(nn.Module):
    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.inner, self.of = layer(), [of]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) @ self.of[0].weight


class Hidden(Deep):
    """The last layer uses the weight of the first one unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[7] = Borrows(self.layers[0])


def squares(model: nn.Module, mb: dict[str, Tensor]) -> Any:
    return (model(mb["x"]) - mb["y"]).square().sum(), mb["x"].shape[0]


def rows(number: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(WIDTH, generator=draw), "y": torch.randn(WIDTH, generator=draw)} for _ in range(number)]


def train(
    world: World, model: Any, plan: dict[str, Any], size: int = 2, number: int = 24, hosts: bool = False
) -> tuple[list[float], dict[str, Tensor], dict[str, tuple[int, int]], set[tuple[int, int]]]:
    """Three steps of 12 samples in microbatches of `size`: losses and norms, the weights that are here, calls and bytes
    of gradients by operation, and the bytes of gradients planned and moved to the host."""
    engine = Engine(
        model,
        squares,
        ADAM,
        Plan(**{"exchange": SMALL, **plan}),
        world=apart(world) if hosts else world,
        precision="fp64",
        clip=0.5,
        global_batch=12,
        microbatch=size,
    )
    moves, numbers, home = Moves(engine), [], set()
    engine.ledger.recording = True
    for batch in engine.batches(rows(number), steps=3):
        moves.before()
        out = engine.step(batch)
        numbers += [out.loss, out.grad_norm]
        if (record := moves.after(batch)) is not None and GRADIENTS in record.planned:
            home.add((record.planned[GRADIENTS], record.moved[GRADIENTS]))
    sent: dict[str, tuple[int, int]] = {}
    for flow, each in engine.ledger.traffic.items():
        if flow.purpose == "gradients":
            calls, payload = sent.get(flow.operation, (0, 0))
            sent[flow.operation] = calls + each.calls, payload + each.payload
    with engine.whole_weights():
        weights = {name: each.detach().clone() for name, each in engine.parameters.items()}
    engine.close()
    return numbers, weights, sent, home


def check(found: list[Any], *call: Any) -> None:
    numbers, weights, *_ = reference(train, 1, *call)[0]
    for each in found:
        assert each[0] == pytest.approx(numbers, rel=1e-10)
        for name, value in each[1].items():
            torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-12)


KEPT = [({"zero": 2}, False), ({"zero": 3}, True), ({"zero": 0, "memory": {}}, False), ({"zero": 2}, True)]


@pytest.mark.parametrize(("options", "hosts"), KEPT, ids=str)
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_rank_with_two_stages_sends_as_much_as_with_one(schedule, options, hosts):
    plan = {"pp": 2, "dp": 2, **options}
    one = run_ranks(train, 4, Deep, plan, 2, 24, hosts)
    two = run_ranks(train, 4, Deep, {**plan, "schedule": schedule}, 2, 24, hosts)
    check(one, Deep, {})
    check(two, Deep, {})
    assert [each[2:] for each in two] == [each[2:] for each in one]
    calls = {"reduce_scatter": 3 * MICROBATCHES * 4}  # three steps, four layers a rank
    if not options["zero"]:  # of a rank alone; copies of the whole add up once a step
        calls["all_reduce"] = 3 * 4
    expected = {operation: (number, number * SMALL["chunk_bytes"]) for operation, number in calls.items()}
    assert all(each[2] == expected for each in two)
    moved = MICROBATCHES * 4 * SMALL["chunk_bytes"] if "memory" in options else None
    assert all(each[3] == ({(moved, moved)} if moved else set()) for each in two)


@pytest.mark.parametrize(
    ("model", "plan", "size", "copied"),
    [(Tied, {"pp": 2, "dp": 2, "zero": 2}, 2, 1), (Deep, {"dp": 4, "shard": 2, "zero": 2}, 1, 8)],
    ids=str,
)
def test_copies_of_a_chunk_add_up_once_a_step(model, plan, size, copied):
    """Stages that share weights would wait for each other in each microbatch."""
    found = run_ranks(train, 4, model, plan, size)
    check(found, model, {}, size)
    chunks = 4 if plan.get("pp") else 8
    for _, _, sent, _ in found:
        assert {operation: calls for operation, (calls, _) in sent.items()} == {
            "reduce_scatter": 3 * MICROBATCHES * chunks,
            "all_reduce": 3 * copied,
        }


@pytest.mark.parametrize(
    ("model", "plan", "size"),
    [(Tied, {"pp": 2, "dp": 2, "zero": 2}, 2), (Deep, {"dp": 4, "shard": 2, "zero": 2}, 1)],
    ids=str,
)
def test_an_exchange_that_reduces_over_all_adds_no_copies_again(model, plan, size):
    inside = {"name": "hierarchical", "ranks_per_host": 2, "chunk_bytes": SMALL["chunk_bytes"]}
    check(run_ranks(train, 4, model, {**plan, "exchange": inside}, size), model, {}, size)


@pytest.mark.parametrize("model", [Deep, Tied, Loose, Idle])
@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "zb1p"])
def test_numbers_are_those_of_one_process(model, schedule):
    table = {"name": schedule, "chunks": 2} if schedule == "zb1p" else schedule
    check(run_ranks(train, 4, model, {"pp": 2, "dp": 2, "zero": 2, "schedule": table}), model, {})


UNEVEN = [
    ({"zero": 2}, 4, 24),  # three microbatches: two and one
    ({"zero": 2}, 2, 20),  # a last batch of 8: as many; the next pass begins anew
    ({"zero": 2}, 6, 18),  # a last batch of 6: one and none
    ({"zero": 2, "shares": [3, 1]}, 2, 24),
    ({"zero": 0, "memory": {}, "shares": [1, 5]}, 2, 24),  # these run as many, some of which do not count
]


@pytest.mark.parametrize(("options", "size", "number"), UNEVEN, ids=str)
def test_replicas_with_differently_many_microbatches_meet_in_all_rounds(options, size, number):
    plan = {"pp": 2, "dp": 2, "schedule": "interleaved", **options}
    found = run_ranks(train, 4, Tied, plan, size, number)
    check(found, Tied, {}, size, number)
    assert all(planned == moved for each in found for planned, moved in each[3])


def test_a_weight_that_a_stage_uses_unseen_is_named():
    with pytest.raises(RankError, match=r"layers\.0\.weight has a gradient of a stage whose parts do not have it"):
        run_ranks(train, 2, Hidden, {"pp": 2, "zero": 2, "memory": {}, "schedule": "zbv"})

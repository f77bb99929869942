"""What error feedback keeps back: over any steps, what was applied and what is kept are the mean gradients, whatever
the steps' counts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal import Engine, Plan, TrainingError
from shoal.comm.simulation import simulate_world
from shoal.data import Batch
from shoal.exchange import State
from shoal.exchange.kept import from_older

ROWS, COLUMNS = 12, 16
SAMPLES = 64

KEEPING: dict[str, dict[str, Any]] = {
    "topk": {"name": "topk", "ratio": 0.05},
    "powersgd": {"name": "powersgd", "rank": 1, "start": 0, "min_compression": 1.0},
    "sign": {"name": "bytegrad", "codec": {"name": "sign", "row": 64}, "error_feedback": True},
    "u4": {"name": "bytegrad", "codec": {"name": "u4", "row": 64}, "error_feedback": True},
    "delayed": {"name": "delayed", "delay": 2},
}


class Given(nn.Module):
    """The gradient of its weight is the sum of what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum((1, 2))


def samples() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    common = torch.randn(ROWS, COLUMNS, generator=draw)
    each = torch.randn(SAMPLES, ROWS, COLUMNS, generator=draw)
    return [
        {"x": common + row, "bad": torch.zeros(()), "count": torch.tensor(i % 5 + 1.0)} for i, row in enumerate(each)
    ]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A sample counts 1 to 5 times; 0 where it says so."""
    weights = torch.where(batch["bad"] < 0, 0.0, batch["count"])
    total = (model(batch["x"]) * weights).sum()
    return total + (batch["bad"].clamp(min=0) * model(batch["x"])).sum(), weights.sum()


def batch_of(step: int, ids: list[int], bad: float = 0.0) -> Batch:
    data = samples()

    def load(some: Any) -> dict[str, Tensor]:
        rows = [dict(data[i]) for i in some]
        for i, row in zip(some, rows, strict=True):
            if bad < 0 or i == ids[0]:
                row["bad"] = torch.tensor(bad)
        return {key: torch.stack([row[key] for row in rows]) for key in rows[0]} if rows else {}

    return Batch(step, 0, ids, load)


def truth(ids: list[int]) -> Tensor:
    rows = [samples()[i] for i in ids]
    return sum(row["x"].double() * row["count"] for row in rows) / sum(float(row["count"]) for row in rows)


def account(world, option: dict[str, Any], sizes: list[int], **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(moved by SGD with lr 1, what this rank keeps, the truth): of steps of so many samples; a size below 0 is a step
    in which nothing counts."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"global_batch": 48, "microbatch": 3, **more}
    bad = options.pop("bad", {})
    engine = Engine(
        Given, loss, partial(torch.optim.SGD, lr=1.0), Plan(dp=world.size, exchange=option), world=world, **options
    )
    wanted, start = torch.zeros(ROWS, COLUMNS, dtype=torch.float64), 0
    for step, size in enumerate(sizes):
        ids = [(start + i) % SAMPLES for i in range(abs(size))]
        start += abs(size)
        try:
            result = engine.step(batch_of(engine.step_index, ids, bad.get(step, -1.0 if size < 0 else 0.0)))
        except TrainingError:
            assert step in bad
            continue
        if size > 0 and not result.skipped:
            wanted += truth(ids)
    kept = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    engine.parts.exchange.settle()
    for name, state in engine.parts.exchange.state().items():
        if "residual" in name or "waiting" in name:
            kept += state.tensors["weight"].double()
    moved = -engine.optimizer.parameters["weight"].detach().double()
    engine.close()
    return moved, kept, wanted


def check(option: dict[str, Any], sizes: list[int], ranks: int = 2, **more: Any) -> None:
    found = simulate_world(ranks, partial(account, **more), option, sizes)
    kept = found[0][1] if option["name"] == "delayed" else sum(each for _, each, _ in found)
    moved, wanted = found[0][0], found[0][2]
    assert kept.norm() > 0.01 * wanted.norm(), "the test is about what is kept back"
    rounding = 1e-3 if "precision" in more else 1e-4
    torch.testing.assert_close(moved + kept, wanted, rtol=0, atol=rounding * len(sizes))


@pytest.mark.parametrize("name", list(KEEPING))
@settings(max_examples=8, deadline=None)
@example(sizes=[23, 22] * 6)
@example(sizes=[46, 23] * 4)
@example(sizes=[7, -4, 5])
@given(
    sizes=st.lists(st.integers(1, 48).map(lambda n: n if n % 9 else -n), min_size=2, max_size=10).filter(
        lambda s: s[-1] > 0 and s[0] > 0
    )
)
def test_applied_and_kept_are_the_truth(name, sizes):
    """-n: n samples of which none counts: nothing is applied, and nothing is lost."""
    check(KEEPING[name], sizes)


@pytest.mark.parametrize("name", ["topk", "powersgd", "sign"])
def test_steps_that_are_skipped_or_refused_lose_nothing(name):
    """A gradient that is not finite, in fp32 (refused) and in fp16 (skipped, and the loss scale changes)."""
    fp16 = {"name": "fp16", "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}
    check(KEEPING[name], [23, 22, 23, 22, 23], bad={2: float("inf")})
    check(KEEPING[name], [23, 22, 23, 22, 23, 22, 23, 23, 23], bad={3: float("inf")}, precision=fp16)


def test_what_goes_on_between_ranks_does_not_matter():
    check(KEEPING["sign"], [13, 29, 30, 5], ranks=3, microbatch=None)
    check(KEEPING["topk"], [13, 29, 30, 5], ranks=4, clip=1e9)


def gives_its_rank(world, qadam: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(the weight, what this rank keeps) after a frozen step in which every sample's gradient is the same: what is kept
    does not depend on the number of replicas."""
    torch.set_num_threads(1)
    engine = Engine(
        Given, loss, partial(torch.optim.Adam, lr=0.1), Plan(dp=world.size, exchange=qadam), global_batch=8, world=world
    )
    for step in range(3):
        engine.step(batch_of(step, list(range(8))))
    kept = sum(
        state.tensors["weight"].double() for name, state in engine.parts.exchange.state().items() if "residual" in name
    )
    weight = engine.optimizer.parameters["weight"].detach().clone()
    engine.close()
    return weight, kept


def test_what_momentum_keeps_is_of_the_mean_of_any_number_of_replicas():
    """The momentum of two replicas and of four is about the same mean, so what the codec keeps back of it is of one
    size, and a resize may hand it on."""
    qadam = {"name": "qadam", "warmup": 1, "codec": {"name": "sign", "row": 64}}
    sizes = [float(sum(kept for _, kept in simulate_world(ranks, gives_its_rank, qadam)).norm()) for ranks in (2, 4)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.35)


def test_residuals_of_older_checkpoints_are_brought_to_the_unit():
    """They were of sums divided by a power of two near the count, 32 for 23; those of momentum of the sum over
    replicas."""
    extra = {"per_sample": 1.0, "global_batch": 23, "plan": {"dp": 4}}
    states = {"residual": State({"w": torch.ones(2)}, "split"), "q": State({"w": torch.ones(2)}, "mean")}
    from_older(states, extra, own_gradients=False)
    torch.testing.assert_close(states["residual"].tensors["w"], torch.full((2,), 32 / 23))
    from_older(states, extra, own_gradients=True)
    torch.testing.assert_close(states["residual"].tensors["w"], torch.full((2,), 32 / 23 / 4))
    assert torch.equal(states["q"].tensors["w"], torch.ones(2)), "no residual, and without a unit"

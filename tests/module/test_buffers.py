"""Buffers that a forward writes, under several ranks beside one process with the same microbatches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.comm import World
from shoal.engine import Engine
from shoal.errors import UserError
from shoal.models import regression
from shoal.models.export import export_whole
from shoal.module.affine import Affine, Rule
from shoal.module.buffers import OtherBuffers
from shoal.module.written import Written
from shoal.plan import Plan
from tests.parity.cases import CASES, engine, vectors
from tests.pool import run_ranks

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Plain(nn.Linear):
    """A layer with a table that nobody writes to."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(3, 2)
        self.register_buffer("table", torch.ones(2, dtype=dtype))


def test_complex_numbers_of_which_safetensors_has_no_type_are_refused_in_words(tmp_path: Path) -> None:
    """The remedy was to free space."""
    module = Plain(torch.complex128)
    error = export_whole(module, module.state_dict(), tmp_path)
    assert isinstance(error, UserError) and "table is complex128, of which safetensors has no type: keep" in str(error)
    assert export_whole(Plain(torch.complex64), Plain(torch.complex64).state_dict(), tmp_path) is None


class Writes(nn.Module):
    """A layer, and a forward that does `rule` to its buffers beside it."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 3)
        self.register_buffer("mean", torch.ones(10))
        self.register_buffer("hidden", torch.zeros(10), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("waves", torch.zeros(6, dtype=torch.complex128), persistent=False)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                more = self.rule(self, x)
            if more is not None:
                x = x + more
        return self.linear(x)


def lerp(model: Writes, x: Tensor) -> None:
    model.mean.lerp_(x.mean(0), 0.25)
    model.calls.add_(1)
    model.waves.mul_(0.5).add_(torch.fft.rfft(x.mean(0).double()))


def twice(model: Writes, x: Tensor) -> None:
    """Two writes a forward, one of them to a buffer that is not saved."""
    for half in (x, 2 * x):
        model.mean.mul_(0.9).add_(half.sum(0), alpha=0.1)
    model.hidden.copy_(0.5 * model.hidden + x.max(0).values)


def bound_anew(model: Writes, x: Tensor) -> None:
    model.mean = 0.9 * model.mean + 0.1 * x.mean(0)
    model.calls = model.calls + len(x)
    model.hidden = 0.5 * model.hidden + x.amax(0)


def past_versions(model: Writes, x: Tensor) -> None:
    """As code of codebooks is written."""
    model.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)


def last(model: Writes, x: Tensor) -> None:
    model.mean.copy_(x.mean(0))


def used_once_set(model: Writes, x: Tensor) -> Tensor:
    """Each forward uses what it has set itself, one of them piece by piece."""
    model.hidden.copy_(x.amax(0))
    model.mean.zero_()
    model.mean[:4] = x[0, :4]
    return model.hidden.sigmoid() * model.mean


EXACT = [lerp, twice, bound_anew, past_versions, last, used_once_set]


def used(model: Writes, x: Tensor) -> Tensor:
    model.mean.lerp_(x.mean(0), 0.25)
    return -model.mean


def by_count(model: Writes, x: Tensor) -> None:
    model.calls.add_(1)
    model.mean.lerp_(x.mean(0), 1 / (1 + model.calls.item()))


def read_out(model: Writes, x: Tensor) -> Tensor:
    """Reads its values by no operation."""
    model.calls.add_(1)
    return x * model.calls.tolist()


def in_waves(model: Writes, x: Tensor) -> Tensor:
    more = torch.fft.irfft(model.waves, n=10)
    model.waves.lerp_(torch.fft.rfft(x.mean(0).double()), 0.5)
    return more.to(x.dtype)


def table_of_before(model: Writes, x: Tensor) -> Tensor:
    """Binds anew what is not persistent, as tables are, to what the next microbatch uses."""
    more = model.hidden.sigmoid()
    model.hidden = x.mean(0)
    return more


def largest(model: Writes, x: Tensor) -> None:
    model.mean.copy_(torch.maximum(model.mean, x.amax(0)))


def part(model: Writes, x: Tensor) -> None:
    model.mean[0] = x[0, 0]


def seldom(model: Writes, x: Tensor) -> None:
    model.seen = getattr(model, "seen", 0) + 1
    if model.seen % 3 == 0:
        model.mean.lerp_(x.mean(0), 0.25)


def warming_up(model: Writes, x: Tensor) -> None:
    model.seen = getattr(model, "seen", 0) + 1
    model.mean.lerp_(x.mean(0), 1 / (1 + model.seen))


def used_then_set(model: Writes, x: Tensor) -> Tensor:
    more = model.mean.sigmoid()
    model.mean.copy_(x.mean(0))
    return more


def set_by_another(model: Writes, x: Tensor) -> Tensor:
    """The running mean comes into the forward by way of a buffer that is set in each."""
    model.mean.lerp_(x.mean(0), 0.25)
    model.hidden.copy_(model.mean)
    return model.hidden.sigmoid()


ODD = {
    used: "it goes into aten.addmm",
    used_then_set: "it goes into aten.sigmoid",
    set_by_another: "so microbatches depend on those before them",
    by_count: "different rules",
    read_out: "it goes into Tensor.tolist",
    in_waves: "it goes into aten._fft_c2r",
    table_of_before: "it goes into aten.sigmoid",
    largest: "maximum",
    part: "aten.copy_",
    seldom: "others do not",
    warming_up: "different rules",
}


def train(
    world: World, rule: Any, steps: int = 3, plan: Any = None, made: Any = Writes, **options: Any
) -> dict[str, Tensor]:
    """Global batches of seven make four microbatches, of which the ranks have unequal numbers."""
    options = {"global_batch": 7, "microbatch": 2, "precision": "fp64", **options}
    running = Engine(
        partial(made, rule), regression, ADAMW, Plan(**{"dp": world.size, **(plan or {})}), world=world, **options
    )
    for batch in running.batches(vectors(), steps=steps):
        running.step(batch)
    found = {name: buffer.clone() for name, buffer in running.module.named_buffers()}
    running.close()
    return found


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize(("size", "plan"), [(2, {}), (3, {"zero": 2})])
def test_buffers_are_those_of_one_process(rule, size, plan):
    (expected,) = run_ranks(train, 1, rule)
    for found in run_ranks(partial(train, plan=plan), size, rule):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


class InTwo(nn.Module):
    """Two parts that both write buffers."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.first, self.middle, self.last = Writes(rule), nn.Linear(3, 10), Writes(rule)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def in_stages(world: World, rule: Any, plan: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """The buffers as they are saved."""
    options = {"global_batch": 5, "microbatch": 2, "precision": "fp64"}
    running = Engine(partial(InTwo, rule), regression, ADAMW, Plan(**plan), world=world, **options)
    for batch in running.batches(vectors(), steps=3):
        running.step(batch)
    running.export(path)
    running.close()
    return load_file(next(path.glob("*.safetensors")))


@pytest.mark.parametrize(("rule", "more"), [(lerp, {}), (bound_anew, {"zero": 3})])
def test_stages_of_a_pipeline_write_their_buffers(rule, more, tmp_path):
    """Those of the first, which leaves the model's forward before its end, and those that only the last one comes to;
    replicas have two and one microbatch."""
    (one,) = run_ranks(in_stages, 1, rule, {}, tmp_path / "one")
    plan = {"dp": 2, "pp": 2, "stages": [["first"], ["middle", "last"]], **more}
    found = run_ranks(in_stages, 4, rule, plan, tmp_path / "four")[0]
    assert found.keys() == one.keys() and len(one) > 6
    for name, value in one.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9)


def test_a_rank_that_is_idle_at_first_follows_the_others():
    (expected,) = run_ranks(partial(train, global_batch=2), 1, lerp)
    for found in run_ranks(partial(train, global_batch=2), 2, lerp):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def refused(world: World, rule: Any, options: dict[str, Any]) -> str:
    try:
        train(world, rule, **options)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rule", ODD)
def test_buffers_on_which_microbatches_depend_are_refused_or_averaged(rule):
    messages = run_ranks(refused, 2, rule, {"steps": 6})
    assert messages[0] == messages[1]
    assert "a forward writes the buffer " in messages[0] and ODD[rule] in messages[0] and "averaged" in messages[0]
    assert run_ranks(refused, 1, rule, {}) == [""]
    one, other = run_ranks(partial(train, buffers="averaged"), 2, rule)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("rule", "remedy"), [(Rule(0.5, 1), "plan.cp = 1"), ("why", "plan.dp = 1 with plan.cp = 1")])
def test_where_ranks_share_rows_the_remedy_is_to_share_none(rule, remedy):
    with pytest.raises(UserError, match=f"or take {remedy}$"):
        OtherBuffers(Writes(lerp), 2, False, "").agree([{"mean": rule}], 2, 2)


def test_buffers_want_a_fixed_microbatch():
    messages = run_ranks(refused, 2, lerp, {"microbatch": None})
    assert messages[0] == messages[1] and "give microbatch=" in messages[0]
    assert run_ranks(refused, 2, lerp, {"microbatch": None, "buffers": "averaged"}) == ["", ""]


def power_iteration(world: World, options: dict[str, Any]) -> str:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(10, 3))
    running = Engine(layer, regression, ADAMW, global_batch=8, microbatch=2, world=world, **options)
    try:
        for batch in running.batches(vectors(), steps=2):
            running.step(batch)
    except UserError as error:
        return str(error)
    return ""


def test_spectral_norm_says_what_to_do():
    for message in run_ranks(power_iteration, 2, {}):
        assert "a forward writes the buffer parametrizations.weight.0._" in message
    assert run_ranks(power_iteration, 2, {"buffers": "averaged"}) == ["", ""]
    with pytest.raises(UserError, match='buffers = "mean"'):
        Engine(nn.Linear(10, 3), regression, ADAMW, global_batch=4, buffers="mean")


def test_the_rule_of_a_buffer_is_what_its_operations_say():
    model, x = Writes(twice), torch.randn(4, 10)
    buffers = dict(model.named_buffers())
    with Affine(buffers) as affine:
        affine.leaves(model(x))
    rules = affine.rules(dict(model.named_buffers()))
    assert rules == {"mean": Rule(pytest.approx(0.81), 4), "hidden": Rule(0.5, 1)}


def test_a_write_to_a_sum_that_a_buffer_is_in_is_none_to_the_buffer():
    """A frozen norm behind a frozen layer, as in DETR's backbone: its result is changed in place, and goes on."""
    shift = torch.ones(3)
    with Affine({"shift": shift}) as affine:
        x = torch.ones(2, 3) + shift.reshape(1, -1)
        x += 1.0
        x.relu()
    assert affine.rules({"shift": shift}) == {}


def compiled(world, plan: dict[str, int]) -> int:
    """How many graphs a model with a table among its buffers is compiled to, whose first forwards are observed."""
    torch._dynamo.utils.counters.clear()
    running = engine("llama", "fp32", 1, world=world, plan=Plan(**plan, compile="aot_eager"))
    for batch in running.batches(CASES["llama"].data(), steps=3):
        running.step(batch)
    running.close()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("plan", [{"dp": 2}, {"cp": 2}])
def test_blocks_are_compiled_after_forwards_that_were_observed(plan):
    assert all(graphs > 0 for graphs in run_ranks(compiled, 2, plan))


def one_block(rule: Any) -> nn.Module:
    return nn.Sequential(Writes(rule))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_runs_compiled_writes_as_often_as_its_graph_does(recompute):
    """A graph writes another number of times than the code that was observed, and what backward computes again of an
    observed forward is computed as it is written too."""
    plan = {"recompute": recompute}
    (expected,) = run_ranks(train, 1, twice, 3, plan, one_block)
    for found in run_ranks(train, 2, twice, 3, {**plan, "compile": "aot_eager"}, one_block):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_more_writes_than_a_graph_makes_are_another_rule():
    layer = torch.nn.Linear(1, 1)
    written = Written([layer])
    assert written.follow("mean", layer, 2, made=2 + 3, observed=1, others=3), "each of three once, by the graph"
    assert written.follow("mean", layer, 2, made=2 + 1 + 2, observed=1, others=2), "one of them as it is written"
    assert not written.follow("mean", layer, 2, made=2 + 5, observed=1, others=2)
    assert not Written([]).follow("mean", layer, 2, made=2 + 3, observed=1, others=3)

"""What the planner answers for models of users: where every candidate of its first search is refused, where values
decide what is computed, and where a row alone has no statistics."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from shoal import Engine, Plan, auto_plan
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from shoal.plan import nbytes
from shoal.planner.cluster import Cluster, Device, Host, Link
from shoal.planner.confirm import confirm
from shoal.planner.least import enough, in_full, needing_least
from shoal.planner.no_room import NoRoom
from shoal.planner.search import search
from shoal.planner.task import Estimate, Task
from tests.planner.models import GIB, cluster, task

DEVICE = Device("cores", {"fp32": 1e11}, 2**33, 1e10, launch=1e-5, on_host=True)
TWO = Cluster("here", (Host(DEVICE, 2, Link(1e-5, 2e9), 2**33, 5e9),), Link(1e-4, 1e9), 0.3)
MLP = {"up": (16, 32), "down": (32, 16)}


class Twice(nn.Module):
    """Goes through its blocks twice, so no cut into stages has each of them once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(*MLP["up"]), nn.GELU(), nn.Linear(*MLP["down"])) for _ in range(4)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            inputs = inputs + block(inputs)
        return inputs


def squares(model: nn.Module, mb: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return F.mse_loss(model(mb["inputs"]), mb["targets"], reduction="sum"), torch.tensor(mb["inputs"].numel())


class Decides(Twice):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) if inputs.sum() > 0 else inputs  # this line


class Normed(Twice):
    """BatchNorm of one value in each channel, where there is one row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(self.norm(inputs))


class Checkpointed(Twice):
    """Goes through its blocks once, and computes them again in backward, two together."""

    def forward(self, inputs: Tensor) -> Tensor:
        for first in (0, 2):
            inputs = checkpoint(self.run, first, inputs, use_reentrant=False)
        return inputs

    def run(self, first: int, inputs: Tensor) -> Tensor:
        return self.blocks[first + 1](self.blocks[first](inputs))


class Tied(Checkpointed):
    """Its first block and its last one share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3][0].weight = self.blocks[0][0].weight


class TiedBeside(Tied):
    """Has a parameter beside its blocks as well, which all stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs + self.shift


class Masked(Checkpointed):
    """Puts a parameter, and a row of features, where a mask says so, as SpecAugment and models with images do."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(()))
        self.shown = nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs * 1.0
        x[torch.tensor([False, True] * 8).expand_as(x)] = self.hidden
        x[:, torch.tensor([True, False, False, True, True, *[False] * 11])] = self.shown(inputs)
        return super().forward(x)


class Spectral(Twice):
    """Its weights are divided by a norm that each forward brings nearer, from vectors in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(spectral_norm(nn.Linear(16, 16)) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return inputs


class Counts(Spectral):
    """Counts its forwards in place, and computes with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("calls", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(inputs) * self.calls


def answered(
    world: Any, pins: dict[str, Any], model: Any = Twice, microbatch: int | None = None, **others: Any
) -> tuple[Plan, int]:
    sample = {"inputs": torch.zeros(16), "targets": torch.zeros(16)}
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    given: dict[str, Any] = {"global_batch": 8, "microbatch": microbatch, "pins": pins, **others}
    cluster = replace(TWO, hosts=(replace(TWO.hosts[0], count=world.size),))
    return auto_plan(model, squares, adamw, sample, world=world, cluster=cluster, **given)


def asked(world: Any, pins: dict[str, Any], model: Any = Twice, microbatch: int | None = None) -> Plan:
    return answered(world, pins, model, microbatch)[0]


def test_another_way_to_divide_is_found_where_the_fastest_is_refused() -> None:
    assert [plan.tp for plan in simulate_world(2, asked, {"dp": 1})] == [2, 2]


def test_a_refusal_gives_each_reason_once() -> None:
    with pytest.raises(UserError, match=r"^auto_plan: no plan .*calls blocks.0.0 more than once") as refusal:
        simulate_world(2, asked, {"pp": 2})
    assert str(refusal.value).count("more than once") == 1


def test_stages_that_share_weights_in_more_ways_than_a_rank_can_are_no_answer() -> None:
    """The engine refused the plan that was given."""
    with pytest.raises(UserError, match=r"weights are shared by the ranks \[\(0, 1, 2, 3\), \(0, 3\)\]"):
        simulate_world(4, asked, {"pp": 4}, TiedBeside)


def test_what_dry_runs_count_beside_is_a_share_of_what_a_rank_may_use() -> None:
    def look(asked: Task, _: Estimate) -> tuple[None, str]:
        return None, "" if asked.share < 1 else "a dry run counts 9.00 GiB"

    for limit in (None, 1.5 * GIB):
        asked = task(limit=limit)
        found = confirm(asked, search(asked), look)
        assert found.task.limit == limit and found.task.most == 0.85 * asked.most and found.passed


def test_what_no_dry_run_has_room_for_is_told_with_a_remedy() -> None:
    asked = task(pins={"zero": 0})
    said = r"a dry run counts 9.00 GiB\. Take more devices, or ones with more memory, .* or free what is pinned$"
    with pytest.raises(UserError, match=said):
        confirm(asked, search(asked), lambda *_: (None, "a dry run counts 9.00 GiB"))


def test_what_needs_least_is_looked_at_where_faster_candidates_have_no_room() -> None:
    """They alone were, twelve at a time, and the question was refused with what there was enough of."""
    asked = task(limit=1.5 * GIB, pins={"tp": 1, "cp": 1})
    near = needing_least(asked)
    least = near and in_full(asked, near.choice)
    assert near is not None and least is not None and least.choice not in [each.choice for each in search(asked).best]

    def look(asked: Task, estimate: Estimate) -> tuple[None, str]:
        return None, "" if asked.share == 1 and estimate.choice == least.choice else "a dry run counts 9.00 GiB"

    found = confirm(asked, search(asked), look)
    assert found.estimate == least and found.task == asked and found.passed and not found.others


@pytest.mark.parametrize("times", [1.3, 2.5, 9.0])
def test_as_much_of_a_device_as_is_named_is_enough(times: float) -> None:
    """Where dry runs counted more than twice the estimate nothing was named."""
    asked = task(pins={"memory": None}, limit=40.0, on=cluster(memory=64 * GIB))

    def look(asked: Task, estimate: Estimate) -> tuple[None, str]:
        return None, "" if times * estimate.bytes <= asked.usable else "a dry run counts more"

    given = replace(asked, limit=float(nbytes(enough(asked, look), "--device")))
    assert times * confirm(given, search(given), look).estimate.bytes <= given.usable
    less = replace(asked, limit=given.usable / 1.06)
    with pytest.raises(NoRoom):
        confirm(less, search(less), look)
    assert enough(replace(asked, cluster=cluster(memory=given.usable / 2)), look) == "", "no such device has as much"


LINE = 1 + next(
    number for number, line in enumerate(Path(__file__).read_text().splitlines()) if line.endswith("  # this line")
)


@pytest.mark.parametrize(("pins", "plan"), [({}, Plan(dp=2)), ({"zero": 3, "tp": 1}, Plan(dp=2, zero=3))])
def test_a_model_that_goes_by_values_is_data_parallel_and_its_line_is_named(
    pins: dict[str, Any], plan: Plan, caplog: Any
) -> None:
    assert simulate_world(2, answered, pins, Decides) == [(plan, 4), (plan, 4)]
    (said,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert f"test_confirm.py:{LINE} decides by values" in said and "Memory and time are not predicted: pin" in said


@pytest.mark.parametrize(("field", "value"), [("tp", 2), ("pp", 2), ("dp", 1)])
def test_what_only_a_trace_could_tell_is_refused(field: str, value: int) -> None:
    said = rf"test_confirm.py:{LINE} decides by values .*only dp = 2 .*and {field} = {value} is pinned: leave it out"
    with pytest.raises(UserError, match=said):
        simulate_world(2, answered, {field: value}, Decides)


def test_a_plan_that_an_engine_refuses_is_no_remedy_where_nothing_can_be_traced() -> None:
    """It was said to be taken as it is."""
    with pytest.raises(UserError, match=r"plan.ep = 2: Decides has no experts .*: take plan.ep = 1$"):
        simulate_world(2, answered, {"ep": 2}, Decides)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_what_masks_pick_in_a_backward_is_traced(axis: str) -> None:
    assert [getattr(plan, axis) for plan in simulate_world(2, asked, {axis: 2}, Masked)] == [2, 2]


def test_batchnorm_of_a_single_row_is_traced() -> None:
    assert [plan.size for plan in simulate_world(2, asked, {}, Normed, 4)] == [2, 2]


def test_stages_of_a_model_that_computes_its_blocks_again_are_run_dry() -> None:
    found = simulate_world(2, asked, {"pp": 2, "schedule": "1f1b", "stages": [3, 5]}, Checkpointed)
    assert [plan.stages for plan in found] == [[3, 5], [3, 5]]


def averaged(world: Any, pins: dict[str, Any]) -> Plan:
    return answered(world, pins, Spectral, 4, buffers="averaged")[0]


def test_a_model_whose_buffers_replicas_cannot_keep_has_one_replica() -> None:
    assert {(plan.dp, plan.cp) for plan in simulate_world(2, asked, {"pp": 1}, Spectral, 4)} == {(1, 1)}
    for pins, said in (
        ({"dp": 2}, "_u, and one process would"),
        ({"tp": 1, "pp": 1}, "take plan.dp = 1. Without replicas"),
    ):
        with pytest.raises(UserError, match=said) as refusal:
            simulate_world(2, asked, pins, Spectral, 4)
        assert "leave out dp" not in str(refusal.value)
    assert [plan.dp for plan in simulate_world(2, averaged, {"tp": 1, "pp": 1})] == [2, 2]


def test_a_model_that_changes_in_place_what_it_computes_with_has_no_stages() -> None:
    """Unless all of its blocks run again. The first step of a pipeline refuses it, after the planner gave it."""
    for pins in ({"pp": 2}, {"pp": 2, "recompute": {"name": "blocks", "full": 3}}):
        with pytest.raises(UserError, match="a pipeline runs that forward before this backward"):
            simulate_world(2, asked, pins, Counts, 2)
    for recompute in ("full", {"name": "blocks", "full": 2, "selective": 2}):
        pins = {"tp": 1, "dp": 1, "recompute": recompute}
        assert [plan.pp for plan in simulate_world(2, asked, pins, Counts, 2)] == [2, 2]


def trained(world: Any, plan: Plan, microbatch: int) -> float:
    rows = [{"inputs": torch.randn(16), "targets": torch.zeros(16)} for _ in range(8)]
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    engine = Engine(Twice, squares, adamw, plan, global_batch=8, microbatch=microbatch, world=world)
    try:
        return float(engine.step(next(engine.batches(rows))).loss)
    finally:
        engine.close()


def test_a_budget_that_is_too_small_is_refused_with_one_that_does() -> None:
    pins: dict[str, Any] = {"dp": 2, "zero": 3, "memory": {"device": "8KiB"}}
    with pytest.raises(UserError, match=r"memory.device = 8.00 KiB is too little: take .* at least") as refusal:
        simulate_world(2, asked, pins)
    given = re.search(r"take ([\d.]+ KiB) at least", str(refusal.value))
    assert given is not None
    pins["memory"] = {"device": given[1]}
    plan, rows = simulate_world(2, answered, pins)[0]
    assert plan.memory == pins["memory"]
    assert all(math.isfinite(loss) for loss in simulate_world(2, trained, plan, rows))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tp": 2}, {"optimizer": torch.optim.Adafactor}, "this optimizer looks at whole parameters"),
    ({"tp": 2, "recompute": "selective", "compile": "aot_eager"}, {}, "keeps nothing of compiled blocks beside tp = 2"),
    ({"pp": 2, "schedule": "pipedream"}, {"model": Tied}, "some of them share weights"),
]


@pytest.mark.parametrize(("pins", "others", "said"), REFUSED, ids=[str(pins) for pins, *_ in REFUSED])
def test_what_an_engine_refuses_beside_its_optimizer_and_precision_is_no_answer(
    pins: dict[str, Any], others: dict[str, Any], said: str
) -> None:
    """It was answered, and the engine refused it."""
    with pytest.raises(UserError, match=said):
        simulate_world(2, with_optimizer, {"dp": 1, **pins}, others)


def with_optimizer(world: Any, pins: dict[str, Any], others: dict[str, Any]) -> Plan:
    """The plan of a model that AdamW trains in fp32, unless `others` say otherwise."""
    sample = {"inputs": torch.zeros(16), "targets": torch.zeros(16)}
    make = partial(others.get("optimizer", torch.optim.AdamW), lr=1e-3)
    given: dict[str, Any] = {"global_batch": 8, "pins": pins, "precision": others.get("precision", "fp32")}
    return auto_plan(others.get("model", Checkpointed), squares, make, sample, world=world, cluster=TWO, **given)[0]

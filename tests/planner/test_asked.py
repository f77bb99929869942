"""What `auto_plan` is given: models that look at themselves, hooks, rows as datasets give them, wrong arguments."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import Engine, Plan, auto_plan
from shoal.comm.simulation import simulate_world
from shoal.errors import UserError
from shoal.optim.tiers.disk import room_for_pages
from shoal.pipeline import units_of
from shoal.planner import Subject
from shoal.planner.cluster import Cluster, Device, Host, Link
from shoal.planner.profile import profile
from shoal.precision import precision

WIDTH, CLASSES = 8, 3
SGD = partial(torch.optim.SGD, lr=0.1)


def machine(ranks: int = 2) -> Cluster:
    device = Device("cores", {"fp32": 1e11, "fp16": 1e11}, 2**33, 1e10, launch=1e-5, on_host=True)
    return Cluster("here", (Host(device, ranks, Link(1e-5, 2e9), 2**33, 5e9),), Link(1e-4, 1e9), 0.3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.size = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(F.gelu(self.up(x)))
        self.size = y.square().mean()
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checks(Net):
    """Looks whether all is finite, and divides by the largest number of all, whose backward asks for NaN."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if torch.isnan(x).any() or torch.isinf(x).any() or not torch.isfinite(x).all():
                raise RuntimeError("the activations are not finite")
        return self.head(x / x.abs().max())


class Left(Net):
    """Finds what its blocks leave on themselves."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.size for block in self.blocks)


class LeftAnew(Left):
    """The same where that is not there before a block has run."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            del block.size


class Direct(Net):
    """Calls the forwards of its blocks, past their hooks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return self.head(x)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))


def sequences() -> nn.Module:
    """Stages in a Sequential, as torchvision's ConvNeXt has them."""
    first, second = (nn.Sequential(Block(), Block()) for _ in range(2))
    between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(nn.Sequential(first, between, second), nn.Linear(WIDTH, CLASSES))


def loss(model: nn.Module, mb: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(mb["x"]), mb["y"], reduction="sum"), len(mb["y"])


def rows() -> list[dict[str, Any]]:
    """An array and a number, as an Engine takes them."""
    draw = np.random.default_rng(0)
    return [{"x": draw.standard_normal(WIDTH).astype(np.float32), "y": number % CLASSES} for number in range(16)]


def planned(world: Any, model: Any, **more: Any) -> tuple[Plan, int]:
    given = {"global_batch": 8, "cluster": machine(), "world": world, **more}
    return auto_plan(model, loss, SGD, rows()[0], **given)


def trained(world: Any, model: Any, plan: Plan, rows_of: int) -> list[float]:
    engine = Engine(model, loss, SGD, plan, global_batch=8, microbatch=rows_of, world=world)
    try:
        return [float(engine.step(batch).loss) for batch in engine.batches(rows(), steps=2)]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("model", "pins"),
    [
        (Checks, {"tp": 2}),
        (Left, {"pp": 2}),
        (LeftAnew, {"pp": 2}),
        (Direct, {"pp": 2}),
        (sequences, {"pp": 2}),
        (Hooked, {"dp": 2}),
    ],
)
def test_a_model_gets_a_plan_that_trains_it(model: Any, pins: dict[str, int]) -> None:
    """Of models that look whether numbers are finite, and that read what a block leaves on itself, it was said that
    they cannot be run; one whose blocks lie in Sequentials of Sequentials had too few."""
    ((plan, microbatch),) = simulate_world(1, partial(planned, pins=pins), model)
    assert plan.size == 2 and all(getattr(plan, field) == degree for field, degree in pins.items())
    whole = simulate_world(1, trained, model, Plan(), microbatch)[0]
    for each in simulate_world(2, trained, model, plan, microbatch):
        assert each == pytest.approx(whole, rel=1e-5)


def test_blocks_in_sequentials_of_sequentials_are_blocks() -> None:
    found = [(unit.name, unit.is_block) for unit in units_of(sequences())]
    layers = ["0.1.0", "0.1.1"]
    assert [name for name, _ in found] == ["0.0.0", "0.0.1", *layers, "0.2.0", "0.2.1", "1"]
    assert [name for name, is_block in found if not is_block] == layers


def test_blocks_whose_forwards_are_called_are_counted() -> None:
    """All that they do was counted for the part before the first of them, and a search divided by nothing."""
    kind = precision("fp32")
    row = {key: torch.as_tensor(each) for key, each in rows()[0].items()}
    hooked, direct = (profile(Subject(model, loss, row, 1, kind), {}) for model in (Net, Direct))
    assert direct == hooked and all(part.products.value for part in direct.parts)


class OfSums(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def test_what_hooks_cannot_see_is_no_plan() -> None:
    """A plan was given that the engine refused."""
    for model, pins, said in (
        (Hooked, {"pp": 2}, r"head.weight has a hook .* Remove the hook"),
        (OfSums, {"dp": 2, "zero": 2}, "this plan keeps no whole sum of 2 microbatches"),
        (OfSums, {"dp": 2, "memory": {}}, "this plan keeps no whole sum of 2 microbatches"),
    ):
        with pytest.raises(UserError, match=said):
            simulate_world(1, partial(planned, pins=pins, microbatch=2), model)
    assert simulate_world(1, partial(planned, pins={"dp": 2, "zero": 2}, microbatch=4), OfSums)[0][0].zero == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"microbatch": 9}, r"microbatch = 9: give 1 to global_batch \(8\) samples"),
        ({"global_batch": 2.5}, "global_batch = 2.5 is a float"),
        ({"buffers": "averages"}, 'buffers = "averages": "exact" refuses'),
        ({"pins": "tp=2"}, "pins = 'tp=2': give a table"),
        ({"precision": "bf61"}, 'precision = "bf61" is not one of'),
    ],
    ids=str,
)
def test_what_an_engine_would_refuse_is_refused_in_its_words(given: dict[str, Any], said: str) -> None:
    """It was the error of whatever came to it first, or another value was taken in silence."""
    with pytest.raises(UserError, match=said):
        simulate_world(1, partial(planned, **given), Net)


def test_a_ready_module_and_an_optimizer_are_refused() -> None:
    with pytest.raises(UserError, match=r"model is a ready module, .* give a function that makes one"):
        simulate_world(1, planned, Net())
    with pytest.raises(UserError, match="optimizer is a ready SGD"):
        auto_plan(Net, loss, SGD(Net().parameters()), rows()[0], global_batch=8, cluster=machine())  # type: ignore[arg-type]


def test_a_disk_that_is_full_here_is_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ended with that; of another machine's disk nothing is known."""
    host = replace(machine().hosts[0], disk=1e9)
    there = replace(machine(), hosts=(host,))
    pins = {"dp": 2, "memory": {"disk": str(tmp_path / "pages")}}
    assert room_for_pages(tmp_path / "pages") > 2**20
    monkeypatch.setattr(sys.modules["shoal.planner.predict"], "room_for_pages", lambda _: 2000)
    for cluster, said in (
        (there, None),
        (replace(there, is_here=True), r"disk: 0.98 KiB are free for a rank, and it takes 16.0 KiB"),
    ):
        asked = partial(planned, pins=pins, cluster=cluster)
        if said is None:
            assert simulate_world(1, asked, Net)[0][0].memory == pins["memory"]
        else:
            with pytest.raises(UserError, match=said):
                simulate_world(1, asked, Net)


def test_pages_of_an_earlier_run_are_room_for_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-0" / "0.a").write_bytes(b"x" * 65536)
    (tmp_path / "rank-0" / "1.a").symlink_to("gone")  # as one that is deleted meanwhile
    (tmp_path / "rest").mkdir()
    (tmp_path / "rest" / "data").write_bytes(b"x" * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert 66536 <= room_for_pages(tmp_path) < 2**20 and room_for_pages(tmp_path / "other") == 1000
